-- Replace a job's last report, and add a point to its curve.
--
--   KEYS[1] progress   string, JSON of the last report
--   KEYS[2] curve      sorted set, JSON of a point -> its step
--   ARGV[1] JSON of the report, ARGV[2] its run, ARGV[3] its generation (0 for a job without), ARGV[4] its step,
--   ARGV[5] JSON of the point, ARGV[6] and ARGV[7] seconds that report and curve are kept, ARGV[8] most points
--
-- Answers 1; 0 for a report of an earlier generation than the last one, as of an agent that was suspended.
--
-- Each step has one point. A training that goes back to a checkpoint continues its curve from there.

local generation, step, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[8])

local is_json, last = pcall(cjson.decode, redis.pcall('GET', KEYS[1]))
if is_json and type(last) == 'table' and last.run == ARGV[2] and 0 < generation
  and generation < (tonumber(last.generation) or 0) then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[6])

-- Keep one point of each stretch of steps: the stretch is a power of two, so that the same ones stay each time.
local function thin()
  local points = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
  local stretch, kept = 1, nil
  while (points[#points] - points[2]) / stretch > most / 2 do
    stretch = 2 * stretch
  end
  for place = 1, #points, 2 do
    local this = math.floor(points[place + 1] / stretch)
    if this == kept then
      redis.call('ZREM', KEYS[2], points[place])
    end
    kept = this
  end
end

if redis.call('TYPE', KEYS[2]).ok ~= 'zset' then
  redis.call('DEL', KEYS[2])
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], step, '+inf')
if step > 0 then
  if redis.call('ZCARD', KEYS[2]) >= most then
    thin()
  end
  redis.call('ZADD', KEYS[2], step, ARGV[5])
end
redis.call('EXPIRE', KEYS[2], ARGV[7])
return 1
