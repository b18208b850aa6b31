-- Note which step applied the last record of leased shards. Of all that are given, or of none.
--
--   KEYS[1] state     hash: generation, digest, added, closed, epochs, epoch, next, dropped, limit, committed, history,
--                     parts
--   KEYS[2] doing     hash, ticket -> "START WORKER": a lease, and the record that it began at
--   KEYS[3] back      sorted set, ticket -> record to begin at: leased before, and to be leased again
--   KEYS[4] acked     sorted set, "TICKET START" -> step that applied its last record, not before the last commit's
--   KEYS[5] failures  hash, ticket -> JSON {"reasons": [...], "offset": records that had been applied}
--   KEYS[6] names     hash, number -> name of a shard; empty when all workers were given the list
--   KEYS[7] answers   hash, worker -> number of the last call that leased it something, and the tickets
--   ARGV[1] generation, ARGV[2] worker, ARGV[3] step, ARGV[4] 'TICKET START TICKET START ...'
--
-- Answers {'ok'}, also when it was done already; {'missing'}; {'stale', generation}; {'lost', ticket} when another
-- worker has that lease, or nobody.

local state = read_state()
local refused = refusal(state, ARGV[1])
if refused then
  return refused
end

local tickets, starts = {}, {}
for ticket, start in string.gmatch(ARGV[4], '(%d+) (%d+)') do
  tickets[#tickets + 1] = ticket
  starts[#starts + 1] = start
end
local finished, acked = {}, {}
for place, lease in ipairs(redis.call('HMGET', KEYS[2], unpack(tickets))) do
  local ticket, start = tickets[place], starts[place]
  if lease == start .. ' ' .. ARGV[2] then
    finished[#finished + 1] = ticket
    acked[#acked + 1] = ARGV[3]
    acked[#acked + 1] = ticket .. ' ' .. start
  elseif lease or tonumber(ticket) >= state.next or redis.call('ZSCORE', KEYS[3], ticket) then
    return {'lost', ticket}
  end
end
if #finished > 0 then
  redis.call('HDEL', KEYS[2], unpack(finished))
  redis.call('ZADD', KEYS[4], unpack(acked))
end
keep()
return {'ok'}
