-- Return the state that a checkpoint has to hold, and mark what earlier steps finished as done.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] generation, ARGV[2] step of the checkpoint, then ticket, offset, ticket, offset, ...: how many
--   records of the leased shards are applied
--
-- Answers {'ok', added, closed, epoch, next, dropped, failures as flat pairs, pending as flat pairs of ticket and
-- offset}; {'missing'}; {'stale', generation}.

local state = read_state()
local refused = refusal(state, ARGV[1])
if refused then
  return refused
end

local positions = positions_from(3)
local pending = {}
local function leave(ticket, offset)
  table.insert(pending, ticket)
  table.insert(pending, whole(offset))
end

local back = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
for place = 1, #back, 2 do
  leave(back[place], tonumber(back[place + 1]))
end
local doing = redis.call('HGETALL', KEYS[2])
for place = 1, #doing, 2 do
  leave(doing[place], math.max(positions[doing[place]] or 0, (parse(doing[place + 1]))))
end
for _, acked in ipairs(acked_after(ARGV[2], positions)) do
  leave(acked[2], acked[3])
end

-- Keep those of the step itself: this rank may be the only one that has applied it, and die before the others do.
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', '(' .. ARGV[2])
redis.call('HSET', KEYS[1], 'committed', ARGV[2])
keep()
local failures = redis.call('HGETALL', KEYS[5])
return {'ok', state.added, state.closed, state.epoch, state.next, state.dropped, failures, pending}
