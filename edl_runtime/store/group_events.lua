-- Read the last events, without what is too long: whoever may write to a job's keys can write megabytes.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] how many events to look at, ARGV[2] the most bytes of all that are returned
--
-- Answers {id, JSON} of each, newest first.

local found, before, room = {}, '+', tonumber(ARGV[2])
for _ = 1, tonumber(ARGV[1]) do
  local entry = redis.call('XREVRANGE', KEYS[5], before, '-', 'COUNT', 1)[1]
  if not entry then
    break
  end
  before = '(' .. entry[1]
  for place = 1, #entry[2], 2 do
    local json = entry[2][place + 1]
    if entry[2][place] == 'event' and #json <= room then
      room = room - #json
      found[#found + 1] = {entry[1], json}
    end
  end
end
return found
