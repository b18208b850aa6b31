-- Take or renew an instance's lease of a checkpoint folder. One job at a time holds a folder.
--
--   KEYS[1] leases  sorted set, member id -> deadline in ms of the clock
--   KEYS[2] holder  hash: job, and about, JSON of it; wall and clock, the clock of the leases
--   ARGV[1] member id, ARGV[2] lease in ms, ARGV[3] the job, ARGV[4] JSON of it
--
-- Answers {} when the job holds the folder; else the JSON of the job that does, the last deadline of its members, and in
-- how many ms that is. Both keys expire a day after their last use.

local now = tick_of(KEYS[2], math.huge, 0)

redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
local holder = redis.call('HMGET', KEYS[2], 'job', 'about')
if holder[1] ~= ARGV[3] then
  if holder[1] and last[2] then
    return {holder[2], tonumber(last[2]), last[2] - now}
  end
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[2], 'job', ARGV[3], 'about', ARGV[4])
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('EXPIRE', KEYS[1], 86400)
return {}
