-- Read fields of the state, without what is too long: whoever may write to a job's keys can write megabytes.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] the most bytes of all that are returned, ARGV[2] and on: the fields
--
-- Answers {Unix time in seconds, the value of each field, nil for none}.

local time = redis.call('TIME')
local found, room = {time[1]}, tonumber(ARGV[1])
for _, value in ipairs(redis.call('HMGET', KEYS[4], unpack(ARGV, 2))) do
  local fits = value and #value <= room
  room = fits and room - #value or room
  found[#found + 1] = fits and value
end
return found
