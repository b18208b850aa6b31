-- End the lease of a task, unless it was ended before: a report that comes late changes nothing.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] pass, ARGV[2] number of the task, ARGV[3] worker, ARGV[4] token of the lease, ARGV[5] done, failed or back,
--   ARGV[6] why it failed
--
-- Answers {'ok', 1 when it has failed too often else 0}, also when it is repeated; {'lost'} when the lease has ended
-- otherwise; {'missing'}.

local state = read_queue()
if not state then
  return {'missing'}
end
local pass, number, worker, token, how, reason = unpack(ARGV)
local ticket = whole(pass * state.added + number)
local _, tickets = end_late_tasks(state)
local reported = redis.call('HGET', KEYS[7], worker) or ''
local report = token .. ' ' .. string.sub(how, 1, 1) .. ' '
local answer = {'ok'}
if tickets[token] == ticket then
  if how == 'failed' then
    fail(state, ticket, 0, reason)
  else
    redis.call('HDEL', KEYS[2], ticket)
    if how == 'back' then
      redis.call('ZADD', KEYS[3], 0, ticket)
    else
      redis.call('HDEL', KEYS[5], ticket)
    end
  end
  -- The last 64: no more threads of a worker wait for an answer at once.
  redis.call('HSET', KEYS[7], worker, string.sub(report .. reported, 1, 64 * #report))
elseif not string.find(reported, report, 1, true) then
  answer[1] = 'lost'
end
keep()
answer[2] = #failures_of(ticket).reasons >= state.limit and 1 or 0
return answer
