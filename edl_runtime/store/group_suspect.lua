-- Report that a member of the generation may be dead: from now on only members with a new heartbeat count as alive.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] the caller's id, ARGV[2] its fence, ARGV[3] lease in ms, ARGV[4] the generation's number, ARGV[5] reason
--
-- Answers 1, or 0 when that is not the current generation, or it was reported before.

local now = tick(tonumber(ARGV[3]), 0)
purge(now)

if not is_held() or number('current') ~= tonumber(ARGV[4]) or get('suspected_at') then
  return 0
end
set('suspected_at', now + 1, 'suspected_by', ARGV[1], 'suspected_for', ARGV[5]) -- later than every heartbeat so far
announce('suspected', {generation = number('current'), instance = index_of(ARGV[1]), reason = ARGV[5]})
return 1
