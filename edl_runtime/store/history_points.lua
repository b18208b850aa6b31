-- Read the newest points of the history, without what is too long: whoever may write to its key can write megabytes.
--
--   KEYS[1] history   stream of {point = JSON}
--   ARGV[1], ARGV[2] the ids of the newest and of the oldest, as of XREVRANGE, ARGV[3] how many points to look at, ARGV[4] the
--   most bytes of all that are returned
--
-- Answers {id, JSON} of each, newest first.

local found, before, left, room = {}, ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
while left > 0 do
  local entries = redis.call('XREVRANGE', KEYS[1], before, ARGV[2], 'COUNT', math.min(left, 100))
  for _, entry in ipairs(entries) do
    local json = entry[2][1] == 'point' and entry[2][2]
    if json and #json <= room then
      room = room - #json
      found[#found + 1] = {entry[1], json}
    end
  end
  if #entries == 0 then
    break
  end
  before = '(' .. entries[#entries][1]
  left = left - #entries
end
return found
