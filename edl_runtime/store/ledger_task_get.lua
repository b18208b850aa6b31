-- Lease the next task of a pass: new ones first, then those that came back. The first call for the pass after one that is
-- over starts it, with all tasks.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] pass, ARGV[2] worker, ARGV[3] token of the lease: a repeated one gets the same answer, in case the first was
--   lost, ARGV[4] ms of the lease
--
-- Answers {'task', its number, name, failures}; {'none', the current pass, why}; {'missing'}.

local state = read_queue()
if not state then
  return {'missing'}
end
local now, tickets = end_late_tasks(state)
local pass, ticket = tonumber(ARGV[1]), tickets[ARGV[3]]
local function answer(...)
  keep()
  return {...}
end

if not ticket then
  local back = redis.call('ZCARD', KEYS[3])
  local is_over = back == 0 and state.next == (state.epoch + 1) * state.added and redis.call('HLEN', KEYS[2]) == 0
  if is_over and pass == state.epoch then
    local dropped = tonumber(redis.call('HGET', KEYS[1], 'dropped'))
    return answer('none', state.epoch, dropped == state.added and 'all failed' or 'pass before')
  elseif is_over and pass == state.epoch + 1 then
    state.epoch = pass
    redis.call('DEL', KEYS[5])
    redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'dropped', 0)
  elseif pass ~= state.epoch then
    return answer('none', state.epoch, pass < state.epoch and 'pass before' or 'pass after')
  end
  if state.next < (state.epoch + 1) * state.added then
    ticket = whole(state.next)
    redis.call('HSET', KEYS[1], 'next', whole(state.next + 1))
  elseif back > 0 then
    ticket = redis.call('ZPOPMIN', KEYS[3])[1]
  else
    return answer('none', state.epoch, 'no more available')
  end
  local ends = now + ARGV[4]
  redis.call('HSET', KEYS[2], ticket, string.format('0 %.0f %.0f %s %s', now, ends, ARGV[3], ARGV[2]))
end
local number = ticket - state.epoch * state.added
return answer('task', number, redis.call('HGET', KEYS[6], whole(number)), #failures_of(ticket).reasons)
