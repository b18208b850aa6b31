-- Put tasks that have failed in the current pass back, with no failures.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] number of the task, '' for all
--
-- Answers {'ok', how many}; {'missing'}.

local state = read_queue()
if not state then
  return {'missing'}
end
end_late_tasks(state)
local count = 0
for _, ticket in ipairs(failed_tasks()) do
  if ARGV[1] == '' or ticket - state.epoch * state.added == tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[5], ticket)
    redis.call('ZADD', KEYS[3], 0, ticket)
    redis.call('HINCRBY', KEYS[1], 'dropped', -1)
    count = count + 1
  end
end
keep()
return {'ok', count}
