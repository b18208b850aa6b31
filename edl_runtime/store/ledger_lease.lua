-- Lease tickets: first returned ones, then the next of the epoch, then of the next epoch once this one is finished.
-- Tickets of shards that were set aside are dropped on the way.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] generation, ARGV[2] worker, ARGV[3] how many at most, ARGV[4] number of the worker's call: a repeated
--   number gets the same answer, in case the first was lost
--
-- Answers {'ok', 1 when there may be more later else 0, added, closed, 'TICKET START TICKET START ...'}: one
-- text, because clients are slow to parse many; {'missing'}; {'stale', generation}.

local state = read_state()
local refused = refusal(state, ARGV[1])
if refused then
  return refused
end

local worker, wanted = ARGV[2], tonumber(ARGV[3])
local before = redis.call('HGET', KEYS[7], worker)
local again = before and string.match(before, '^' .. ARGV[4] .. ' (.*)$')
if again then
  return {'ok', 1, state.added, state.closed, again}
end

local given, leases = {}, {}
local failing = redis.call('EXISTS', KEYS[5]) == 1

local function take(ticket, start)
  if failing and #failures_of(ticket).reasons >= state.limit then
    drop()
    return
  end
  given[#given + 1] = ticket .. ' ' .. start
  leases[#leases + 1] = ticket
  leases[#leases + 1] = start .. ' ' .. worker
end

local in_back = redis.call('ZCARD', KEYS[3])
while #given < wanted do
  if in_back > 0 then
    local first = redis.call('ZPOPMIN', KEYS[3])
    in_back = in_back - 1
    take(first[1], first[2])
  elseif state.next < (state.epoch + 1) * state.added then
    take(whole(state.next), '0')
    state.next = state.next + 1
  elseif state.closed == 1 and #given == 0 and state.epoch + 1 < state.epochs
    and redis.call('HLEN', KEYS[2]) == 0 then
    state.epoch = state.epoch + 1
  else
    break
  end
end

local more = 1
local tickets = table.concat(given, ' ')
if #given > 0 then
  redis.call('HSET', KEYS[2], unpack(leases))
  redis.call('HSET', KEYS[7], worker, ARGV[4] .. ' ' .. tickets)
elseif state.closed == 1 and redis.call('HLEN', KEYS[2]) == 0 then
  more = 0
end
redis.call('HSET', KEYS[1], 'next', whole(state.next), 'epoch', whole(state.epoch))
keep()
return {'ok', more, state.added, state.closed, tickets}
