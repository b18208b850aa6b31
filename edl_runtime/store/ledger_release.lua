-- End the leases of dead workers, and take back what was finished by steps that are not in the surviving model.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] generation, ARGV[2] last step of the surviving model, ARGV[3] how many workers are alive, then their
--   names, then ticket, offset, ticket, offset, ...
--
-- Answers {'ok', how many came back}; {'missing'}; {'stale', generation}.

local state = read_state()
local refused = refusal(state, ARGV[1])
if refused then
  return refused
end

local alive = {}
for place = 4, 3 + ARGV[3] do
  alive[ARGV[place]] = true
end
local positions = positions_from(4 + ARGV[3])

local count = 0
local doing = redis.call('HGETALL', KEYS[2])
for place = 1, #doing, 2 do
  local ticket = doing[place]
  local start, worker = parse(doing[place + 1])
  if not alive[worker] then
    redis.call('HDEL', KEYS[2], ticket)
    redis.call('ZADD', KEYS[3], math.max(positions[ticket] or 0, start), ticket)
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
