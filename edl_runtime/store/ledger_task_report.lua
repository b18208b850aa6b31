-- Describe the current pass.
--
--   KEYS: as listed in _ledger.lua
--
-- Answers {'ok', pass, tasks, free ones, ms of the clock, leases as flat pairs, failures as flat pairs, tickets that failed
-- too often}; {'missing'}.

local state = read_queue()
if not state then
  return {'missing'}
end
local now = end_late_tasks(state)
keep()
local free = (state.epoch + 1) * state.added - state.next + redis.call('ZCARD', KEYS[3])
return {'ok', state.epoch, state.added, free, now, redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[5]),
  failed_tasks()}
