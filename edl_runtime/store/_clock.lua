-- Stands before the scripts that count leases: the one clock by which they run.
--
-- The clock of a hash, in its fields wall and clock, goes by Redis's, but never back, and on by no more than `most` ms at
-- once: with math.huge it takes any time for true, with less it stands still while nobody asks it. Where it is not
-- known, as in an empty Redis, or is behind `known`, it goes on from there. Answers it and Redis's own, in ms.
local function tick_of(key, most, known)
  local time = redis.call('TIME')
  local wall = time[1] * 1000 + math.floor(time[2] / 1000)
  local last = redis.call('HMGET', key, 'wall', 'clock')
  local now = math.max(wall, known)
  if last[1] then
    now = math.max(last[2] + math.min(math.max(wall - last[1], 0), most), known)
  end
  redis.call('HSET', key, 'wall', wall, 'clock', now)
  redis.call('EXPIRE', key, 86400)
  return now, wall
end

