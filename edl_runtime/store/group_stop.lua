-- Ask the trainers to end with a checkpoint.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] why
--
-- Answers 1, or 0 when no agent is registered, or the job has ended. The group's clock advances by at most a third of a
-- lease per call, so if all agents are dead the first calls may still answer 1.

if redis.call('EXISTS', KEYS[1]) == 1 then
  purge((tick(number('ttl'), 0)))
end
if redis.call('EXISTS', KEYS[1]) == 0 or get('outcome') then
  return 0
end
if redis.call('HSETNX', KEYS[4], 'stop', ARGV[1]) == 1 then
  announce('stop', {generation = number('current'), reason = ARGV[1]})
end
return 1
