-- Count what is where.
--
--   KEYS[1] state     hash: generation, digest, added, closed, epochs, epoch, next, dropped, limit, committed, history,
--                     parts
--   KEYS[2] doing     hash, ticket -> "START WORKER": a lease, and the record that it began at
--   KEYS[3] back      sorted set, ticket -> record to begin at: leased before, and to be leased again
--   KEYS[4] acked     sorted set, "TICKET START" -> step that applied its last record, not before the last commit's
--   KEYS[5] failures  hash, ticket -> JSON {"reasons": [...], "offset": records that had been applied}
--   KEYS[6] names     hash, number -> name of a shard; empty when all workers were given the list
--   KEYS[7] answers   hash, worker -> number of the last call that leased it something, and the tickets
--
-- Answers {'ok', generation, added, closed, epochs, epoch, next, dropped, limit, committed, doing, back, acked,
-- failures as flat pairs}; {'missing'}.

local state = read_state()
if is_missing(state) then
  return {'missing'}
end
local answer = {'ok'}
for _, field in ipairs(FIELDS) do
  table.insert(answer, state[field])
end
local committed = redis.call('HGET', KEYS[1], 'committed')
table.insert(answer, tonumber(committed))
table.insert(answer, redis.call('HLEN', KEYS[2]))
table.insert(answer, redis.call('ZCARD', KEYS[3]))
table.insert(answer, redis.call('ZCOUNT', KEYS[4], '(' .. committed, '+inf'))
table.insert(answer, redis.call('HGETALL', KEYS[5]))
return answer
