-- Let another generation change the ledger, and none before it. The number never goes back.
--
--   KEYS[1] state     hash: generation, digest, added, closed, epochs, epoch, next, dropped, limit, committed, history,
--                     parts
--   KEYS[2] doing     hash, ticket -> "START WORKER": a lease, and the record that it began at
--   KEYS[3] back      sorted set, ticket -> record to begin at: leased before, and to be leased again
--   KEYS[4] acked     sorted set, "TICKET START" -> step that applied its last record, not before the last commit's
--   KEYS[5] failures  hash, ticket -> JSON {"reasons": [...], "offset": records that had been applied}
--   KEYS[6] names     hash, number -> name of a shard; empty when all workers were given the list
--   KEYS[7] answers   hash, worker -> number of the last call that leased it something, and the tickets
--   ARGV[1] generation, ARGV[2] worker
--
-- Answers {'ok', the tickets that the worker holds ...}; {'missing'}; {'stale', generation} when a later one has begun.

local state = read_state()
if is_missing(state) then
  return {'missing'}
end
if state.generation > tonumber(ARGV[1]) then
  return {'stale', state.generation}
end
redis.call('HSET', KEYS[1], 'generation', ARGV[1])
keep()
local answer = {'ok'}
local doing = redis.call('HGETALL', KEYS[2])
for place = 1, #doing, 2 do
  local _, worker = parse(doing[place + 1])
  if worker == ARGV[2] then
    table.insert(answer, doing[place])
  end
end
return answer
