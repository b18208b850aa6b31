-- Tell what a checkpoint has to hold, and take what steps before its own finished for done.
--
--   KEYS[1] state     hash: generation, digest, added, closed, epochs, epoch, next, dropped, limit, committed, history,
--                     parts
--   KEYS[2] doing     hash, ticket -> "START WORKER": a lease, and the record that it began at
--   KEYS[3] back      sorted set, ticket -> record to begin at: leased before, and to be leased again
--   KEYS[4] acked     sorted set, "TICKET START" -> step that applied its last record, not before the last commit's
--   KEYS[5] failures  hash, ticket -> JSON {"reasons": [...], "offset": records that had been applied}
--   KEYS[6] names     hash, number -> name of a shard; empty when all workers were given the list
--   KEYS[7] answers   hash, worker -> number of the last call that leased it something, and the tickets
--   ARGV[1] generation, ARGV[2] step of the checkpoint, then ticket, offset, ticket, offset, ...: what is applied of
--   the shards that are in hand
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

-- Those of the step itself stay: the one that is told here may have applied it alone, and be lost before others have.
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', '(' .. ARGV[2])
redis.call('HSET', KEYS[1], 'committed', ARGV[2])
keep()
local failures = redis.call('HGETALL', KEYS[5])
return {'ok', state.added, state.closed, state.epoch, state.next, state.dropped, failures, pending}
