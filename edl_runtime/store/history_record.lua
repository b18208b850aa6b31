-- Add a point to the history, unless nothing has changed.
--
--   KEYS[1] history   stream of {point = JSON}, at most about ARGV[4]
--   ARGV[1] JSON of the point, ARGV[2] ms in which there are two points at most, ARGV[3] ms after which an
--   unchanged point is added again, ARGV[4] how many are kept, ARGV[5] seconds that the stream outlives its last point
--
-- Answers 1 if the point was added, else 0. Of several within ARGV[2] the first and the newest are kept. When Redis's
-- clock was set back, a new point gets the time of the last one.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function since(point)
  return now - tonumber(string.match(point[1], '^%d+'))
end

local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 2)
if last[1] and last[1][2][2] == ARGV[1] and since(last[1]) < tonumber(ARGV[3]) then
  return 0
end
if last[2] and since(last[2]) >= 0 and since(last[2]) < tonumber(ARGV[2]) then
  redis.call('XDEL', KEYS[1], last[1][1])
end

redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[4], '*', 'point', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
