-- Remember what is seen, unless that was done just now, or there is nothing new to remember.
--
--   KEYS[1] history   stream of {point = JSON}, at most about so many as the last writer said
--   ARGV[1] JSON of the point, ARGV[2] ms that two points are apart at least, ARGV[3] ms after which one is added that
--   says the same, ARGV[4] how many are kept, ARGV[5] seconds that the stream outlives its last point
--
-- Answers 1 if the point was added, else 0. When Redis's clock was set back, what is new is added to the last one's time.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last then
  local since = now - tonumber(string.match(last[1], '^%d+'))
  local says_the_same = last[2][2] == ARGV[1]
  if (since >= 0 and since < tonumber(ARGV[2])) or (says_the_same and since < tonumber(ARGV[3])) then
    return 0
  end
end

redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[4], '*', 'point', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
