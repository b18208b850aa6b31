-- The clock that all leases are measured by. Prepended to every script.
--
-- Advances the clock in the fields wall and clock of a hash. It follows Redis's time but never goes back, and advances by
-- at most `most` ms per call: with less than math.huge it stops while nobody calls. It is never behind `known`, as in a
-- Redis that was emptied. Returns this clock and Redis's time, in ms.
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

