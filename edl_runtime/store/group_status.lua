-- Read fields of the state, without what is too long: whoever may write to a job's keys can write megabytes.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] the most bytes of all that are returned, ARGV[2] and on: the fields
--
-- Answers {Unix time in seconds, the value of each field, nil for none}.

local time = redis.call('TIME')
local found, room = {time[1]}, tonumber(ARGV[1])
for place = 2, #ARGV do
  local size = redis.call('HSTRLEN', KEYS[4], ARGV[place])
  found[place] = size <= room and get(ARGV[place])
  room = found[place] and room - size or room
end
return found
