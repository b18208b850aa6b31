-- Record which step applied the last record of leased shards: of all that are given, or of none.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] generation, ARGV[2] worker, ARGV[3] step, ARGV[4] 'TICKET START TICKET START ...'
--
-- Answers {'ok'}, also when it is repeated; {'missing'}; {'stale', generation}; {'lost', ticket} when the worker does not
-- hold that lease.

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
