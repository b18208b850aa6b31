-- Ask the trainers to end with a checkpoint.
--
--   KEYS[1] leases   sorted set, member id -> deadline in ms
--   KEYS[2] records  hash, member id -> JSON of the member
--   KEYS[3] beats    hash, member id -> its fence, times and state
--   KEYS[4] state    hash, the generation and all that is said of it
--   KEYS[5] events   stream of {event = JSON}
--   ARGV[1] why
--
-- Answers 1, or 0 when nobody is registered, or the job has ended. The group's clock goes on by a third of a lease with
-- each call at most, so of instances that are dead it may say 1 before it says 0.

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
