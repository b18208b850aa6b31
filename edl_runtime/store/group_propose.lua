-- Publish a generation, unless another came first or one of its members is not ready.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] the proposer's id, ARGV[2] its fence, ARGV[3] lease in ms,
--   ARGV[4] number of the generation that it is to follow, ARGV[5] JSON of the generation without '{"number":N,',
--   ARGV[6] its members' ids, ARGV[7] gear, ARGV[8] reason
--
-- Answers the generation's JSON, '' when it was not published.

local now = tick(tonumber(ARGV[3]), 0)
purge(now)

if not is_held() or get('outcome') or number('quiet_until') > now or number('current') ~= tonumber(ARGV[4]) then
  return ''
end
for member in string.gmatch(ARGV[6], '%S+') do
  local of = beat_of(member)
  if not of or of.status ~= 'ready' then
    return ''
  end
end

local next_number = redis.call('HINCRBY', KEYS[4], 'number', 1)
local generation = string.format('{"number":%.0f,', next_number) .. ARGV[5]
set('generation', generation, 'current', next_number, 'members', ARGV[6], 'formed', 'forming', 'since', now,
  'proposed_at', now)
unset('resumed', 'left', 'suspected_at', 'suspected_by', 'suspected_for', 'waits')
if number('overtime') == 0 then
  unset('late_announced')
end
announce('forming', {generation = next_number, members = indexes(ARGV[6]), gear = ARGV[7], reason = ARGV[8]})
return generation
