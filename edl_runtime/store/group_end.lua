-- Record how the job has ended.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] the caller's id, ARGV[2] its fence, ARGV[3] lease in ms, ARGV[4] JSON of the outcome, ARGV[5] its kind,
--   ARGV[6] why
--
-- Answers 1, or 0 when it was recorded before, or the caller has no lease.

purge((tick(tonumber(ARGV[3]), 0)))

if not is_held() or redis.call('HSETNX', KEYS[4], 'outcome', ARGV[4]) == 0 then
  return 0
end
announce('ended', {generation = number('current'), outcome = ARGV[5], reason = ARGV[6]})
return 1
