-- Say that a member of the generation may be dead: from now on only those count as alive who beat anew.
--
--   KEYS[1] leases   sorted set, member id -> deadline in ms
--   KEYS[2] records  hash, member id -> JSON of the member
--   KEYS[3] beats    hash, member id -> its fence, times and state
--   KEYS[4] state    hash, the generation and all that is said of it
--   KEYS[5] events   stream of {event = JSON}
--   ARGV[1] id of who says so, ARGV[2] its fence, ARGV[3] lease in ms, ARGV[4] the generation's number, ARGV[5] reason
--
-- Answers 1, or 0 when that is not the generation that counts, or somebody has said so.

local now = tick(tonumber(ARGV[3]), 0)
purge(now)

if not is_held() or number('current') ~= tonumber(ARGV[4]) or get('suspected_at') then
  return 0
end
set('suspected_at', now + 1, 'suspected_by', ARGV[1], 'suspected_for', ARGV[5]) -- later than any beat so far
announce('suspected', {generation = number('current'), instance = index_of(ARGV[1]), reason = ARGV[5]})
return 1
