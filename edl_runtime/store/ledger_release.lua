-- End the leases of dead workers, and take back what was finished by steps that are not in the surviving model.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] generation, ARGV[2] last step of the surviving model, ARGV[3] reason if this counts as a failure of their
--   shards, else '', ARGV[4] how many workers are alive, then their names, then ticket, offset, ticket, offset, ...
--
-- Answers {'ok', how many came back}; {'missing'}; {'stale', generation}.

local state = read_state()
local refused = refusal(state, ARGV[1])
if refused then
  return refused
end

local alive = {}
for place = 5, 4 + ARGV[4] do
  alive[ARGV[place]] = true
end
local positions = positions_from(5 + ARGV[4])

local count = 0
local doing = redis.call('HGETALL', KEYS[2])
for place = 1, #doing, 2 do
  local ticket = doing[place]
  local start, worker = parse(doing[place + 1])
  if not alive[worker] then
    local offset = math.max(positions[ticket] or 0, start)
    if ARGV[3] == '' then
      redis.call('HDEL', KEYS[2], ticket)
      redis.call('ZADD', KEYS[3], offset, ticket)
    else
      fail(state, ticket, offset, ARGV[3])
    end
    count = count + 1
  end
end
for _, worker in ipairs(redis.call('HKEYS', KEYS[7])) do
  if not alive[worker] then
    redis.call('HDEL', KEYS[7], worker)
  end
end
for _, acked in ipairs(acked_after(ARGV[2], positions)) do
  redis.call('ZREM', KEYS[4], acked[1])
  redis.call('ZADD', KEYS[3], acked[3], acked[2])
  count = count + 1
end
keep()
return {'ok', count}
