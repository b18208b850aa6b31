-- Set the ledger to a checkpoint's state: what was leased or acked since is leased again. Shards added to a stream since
-- then stay, and so do the failures, unless this is a new start.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] generation, ARGV[2] epochs, ARGV[3] failures that set a shard aside, ARGV[4] '1' for a new start,
--   ARGV[5] JSON of the state
--
-- Answers {'ok'}; {'stale', generation} when a later one has begun.

local before = read_state()
if before.generation and before.generation > tonumber(ARGV[1]) then
  return {'stale', before.generation}
end

local state = cjson.decode(ARGV[5])
local stream = state.digest == ''
local same = (redis.call('HGET', KEYS[1], 'digest') or '') == state.digest
local added, closed = state.added, state.closed
if stream and same then
  added, closed = math.max(added, before.added or 0), closed or before.closed == 1
else
  redis.call('DEL', KEYS[6])
end
if ARGV[4] == '1' or not same then
  redis.call('DEL', KEYS[5])
end

redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[7])
redis.call('HSET', KEYS[1], 'generation', ARGV[1], 'epochs', ARGV[2], 'limit', ARGV[3], 'digest', state.digest,
  'added', whole(added), 'closed', closed and 1 or 0, 'epoch', whole(state.epoch), 'next', whole(state.next),
  'dropped', whole(state.dropped), 'committed', whole(state.step), 'history', history())
for _, pending in ipairs(state.pending) do
  redis.call('ZADD', KEYS[3], whole(pending[2]), whole(pending[1]))
end
for _, failure in ipairs(state.failures) do
  local ticket, record = whole(failure[1]), failure[2]
  if #record.reasons > #failures_of(ticket).reasons then
    redis.call('HSET', KEYS[5], ticket, cjson.encode(record))
  end
end
for _, name in ipairs(state.names) do
  redis.call('HSET', KEYS[6], whole(name[1]), name[2])
end
keep()
return {'ok'}
