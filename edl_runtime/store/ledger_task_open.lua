-- Make a queue of tasks unless there is one. Its list is added by ledger_add, and completed by ledger_close.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] digest of the list, ARGV[2] failures that end a task's pass
--
-- Answers {'ok', 1 when its list is complete else 0}; {'differs'} when the job has another list.

local state = read_state()
local digest = redis.call('HGET', KEYS[1], 'digest')
if digest and digest ~= ARGV[1] then
  return {'differs'}
elseif not digest then
  redis.call('DEL', unpack(KEYS)) -- names alone are those of a queue that was lost while they were added
  redis.call('HSET', KEYS[1], 'digest', ARGV[1], 'generation', 1, 'added', 0, 'closed', 0, 'epochs', 1, 'epoch', 0,
    'next', 0, 'dropped', 0, 'committed', 0, 'history', 'any')
  state = {}
end
redis.call('HSET', KEYS[1], 'limit', ARGV[2])
keep()
return {'ok', state.closed or 0}
