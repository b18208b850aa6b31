-- Read what the readers of a job's instances last reported, without what is too long: whoever may write to a job's keys can
-- write megabytes.
--
--   KEYS[1] readers' progress   hash, instance -> JSON of the last report of its reader
--   ARGV[1] how many reports are returned, ARGV[2] the most bytes of all
--
-- Answers the JSON of each report.

local found, room = {}, tonumber(ARGV[2])
for _, json in ipairs(redis.call('HVALS', KEYS[1])) do
  if #found < tonumber(ARGV[1]) and #json <= room then
    room = room - #json
    found[#found + 1] = json
  end
end
return found
