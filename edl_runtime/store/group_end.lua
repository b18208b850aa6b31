-- Say how the job has ended.
--
--   KEYS[1] leases   sorted set, member id -> deadline in ms
--   KEYS[2] records  hash, member id -> JSON of the member
--   KEYS[3] beats    hash, member id -> its fence, times and state
--   KEYS[4] state    hash, the generation and all that is said of it
--   KEYS[5] events   stream of {event = JSON}
--   ARGV[1] id of who says so, ARGV[2] its fence, ARGV[3] lease in ms, ARGV[4] JSON of the outcome, ARGV[5] its kind,
--   ARGV[6] why
--
-- Answers 1, or 0 when somebody has said so before, or the caller has no lease.

purge((tick(tonumber(ARGV[3]), 0)))

if not is_held() or redis.call('HSETNX', KEYS[4], 'outcome', ARGV[4]) == 0 then
  return 0
end
announce('ended', {generation = number('current'), outcome = ARGV[5], reason = ARGV[6]})
return 1
