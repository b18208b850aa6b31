-- Give back a leased shard that could not be read, or set it aside when it has failed too often.
--
--   KEYS[1] state     hash: generation, digest, added, closed, epochs, epoch, next, dropped, limit, committed, history,
--                     parts
--   KEYS[2] doing     hash, ticket -> "START WORKER": a lease, and the record that it began at
--   KEYS[3] back      sorted set, ticket -> record to begin at: leased before, and to be leased again
--   KEYS[4] acked     sorted set, "TICKET START" -> step that applied its last record, not before the last commit's
--   KEYS[5] failures  hash, ticket -> JSON {"reasons": [...], "offset": records that had been applied}
--   KEYS[6] names     hash, number -> name of a shard; empty when all workers were given the list
--   KEYS[7] answers   hash, worker -> number of the last call that leased it something, and the tickets
--   ARGV[1] generation, ARGV[2] worker, ARGV[3] ticket, ARGV[4] records of it that are applied, ARGV[5] reason
--
-- Answers {'ok', failures so far}, 0 when the worker does not hold it, as when it is said twice; {'missing'};
-- {'stale', generation}.

local state = read_state()
local refused = refusal(state, ARGV[1])
if refused then
  return refused
end

local lease = redis.call('HGET', KEYS[2], ARGV[3])
if not lease then
  return {'ok', 0}
end
local start, worker = parse(lease)
if worker ~= ARGV[2] then
  return {'ok', 0}
end
local count = fail(state, ARGV[3], math.max(start, tonumber(ARGV[4])), ARGV[5])
keep()
return {'ok', count}
