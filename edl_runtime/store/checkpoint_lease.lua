-- Take or renew an instance's lease of a checkpoint folder. One job at a time holds a folder.
--
--   KEYS[1] leases  sorted set, member id -> deadline in ms of the clock
--   KEYS[2] holder  hash: job, and about, JSON of it; wall and clock, the clock of the leases
--   KEYS[3] locks   sorted set, token of a lock file in the folder -> its last renewal in ms of the clock
--   ARGV[1] member id, ARGV[2] lease in ms, ARGV[3] the job, ARGV[4] JSON of it, ARGV[5] token of the member's lock file
--
-- Answers {tokens} when the job holds the folder; else {tokens, JSON of the job that does, the last deadline of its
-- members, in how many ms that is}. All tokens of processes that use this Redis are in `tokens`, by whatever address they
-- reach it. The keys, and each token, expire a day after their last use.

local now = tick_of(KEYS[2], math.huge, 0)

local day = 86400
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - day * 1000)
redis.call('ZADD', KEYS[3], now, ARGV[5])
redis.call('EXPIRE', KEYS[3], day)
local tokens = redis.call('ZRANGE', KEYS[3], 0, -1)

redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
local holder = redis.call('HMGET', KEYS[2], 'job', 'about')
if holder[1] ~= ARGV[3] then
  if holder[1] and last[2] then
    return {tokens, holder[2], tonumber(last[2]), last[2] - now}
  end
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[2], 'job', ARGV[3], 'about', ARGV[4])
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('EXPIRE', KEYS[1], day)
return {tokens}
