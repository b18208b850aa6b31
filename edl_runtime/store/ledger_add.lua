-- Append shards to a stream. Those of numbers that it has already are passed over, so doing it twice is doing it once.
--
--   KEYS[1] state     hash: generation, digest, added, closed, epochs, epoch, next, dropped, limit, committed, history,
--                     parts
--   KEYS[2] doing     hash, ticket -> "START WORKER": a lease, and the record that it began at
--   KEYS[3] back      sorted set, ticket -> record to begin at: leased before, and to be leased again
--   KEYS[4] acked     sorted set, "TICKET START" -> step that applied its last record, not before the last commit's
--   KEYS[5] failures  hash, ticket -> JSON {"reasons": [...], "offset": records that had been applied}
--   KEYS[6] names     hash, number -> name of a shard; empty when all workers were given the list
--   KEYS[7] answers   hash, worker -> number of the last call that leased it something, and the tickets
--   ARGV[1] number of the first shard given, ARGV[2] on: their names
--
-- Answers {'ok'}; {'gap', added} when numbers before the first are missing; {'differs', number} when that number has
-- another name; {'closed', added} when there was to be no more.

local state = read_state()
local added, first = state.added or 0, tonumber(ARGV[1])
if first > added then
  return {'gap', added}
end
local last = first + #ARGV - 2
if last >= added and state.closed == 1 and #ARGV > 1 then
  return {'closed', added}
end
for place = 2, #ARGV do
  local number = first + place - 2
  local known = redis.call('HGET', KEYS[6], whole(number))
  if known and known ~= ARGV[place] then
    return {'differs', number}
  end
end
for place = 2, #ARGV do
  redis.call('HSET', KEYS[6], whole(first + place - 2), ARGV[place])
end
redis.call('HSET', KEYS[1], 'added', whole(math.max(added, last + 1)))
keep()
return {'ok'}
