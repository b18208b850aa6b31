-- Read a job's curve, without what is too long: whoever may write to a job's keys can write megabytes.
--
--   KEYS[1] curve   sorted set, JSON of a point -> its step
--   ARGV[1] how many points to look at, ARGV[2] the most bytes of all that are returned
--
-- Answers the JSON of each point, of the highest step first.

local found, room = {}, tonumber(ARGV[2])
for place = 0, tonumber(ARGV[1]) - 1 do
  local json = redis.call('ZREVRANGE', KEYS[1], place, place)[1]
  if not json then
    break
  end
  if #json <= room then
    room = room - #json
    found[#found + 1] = json
  end
end
return found
