-- Remember what is seen, unless there is nothing new to remember.
--
--   KEYS[1] history   stream of {point = JSON}, at most about so many as the last writer said
--   ARGV[1] JSON of the point, ARGV[2] ms in which there are two points at most, ARGV[3] ms after which one is added that
--   says the same, ARGV[4] how many are kept, ARGV[5] seconds that the stream outlives its last point
--
-- Answers 1 if the point was added, else 0. Of many within ARGV[2] the first is kept, and the newest, which holds until
-- the next one: it takes the place of the one before. When Redis's clock was set back, what is new is added to the last
-- one's time.

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
