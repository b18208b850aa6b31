-- Prepended to every script of the registry: how long its keys are kept, and which leases have expired.
--
-- The keys are those of one service (a pool's teachers or students):
--   KEYS[1] leases    sorted set, member id -> deadline in ms of the clock
--   KEYS[2] records   hash, member id -> JSON of the member, beginning {"fence":N,"holder":"NAME",
--   KEYS[3] contract  string, JSON of the signature that all members share; gone with the last member
--   KEYS[4] events    stream of {joined|left|expired|drained = member id}, the last 1,000 or so
--   KEYS[5] fence     counter, the last fencing token
--   KEYS[6] reports   hash, member id -> JSON of what it last reported, beginning {"at":SECONDS of the clock
--   KEYS[7] clock     hash: wall and clock, by which leases run, and changed: when a member last joined or left
--   KEYS[8] drained   hash, id of a member that was drained -> the random name of its holder

-- Keys expire a day after their last use, so the names of past runs don't pile up. A fence that has expired starts again
-- from the clock, so it is still larger than every earlier one.
local function keep()
  for _, key in ipairs(KEYS) do
    redis.call('EXPIRE', key, 86400)
  end
end

local function now_ms()
  return (tick_of(KEYS[7], math.huge, 0))
end

-- Of a service so many members, and so many bytes of their records or reports, are read: whoever may write to its keys can write
-- megabytes.
local MOST_MEMBERS, MOST_BYTES = 10000, 4 * 1024 * 1024

local function announce(what, id)
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', what, id)
  redis.call('HSET', KEYS[7], 'changed', redis.call('HGET', KEYS[7], 'clock'))
  keep()
end

local function drop(id, why)
  redis.call('ZREM', KEYS[1], id)
  redis.call('HDEL', KEYS[2], id)
  redis.call('HDEL', KEYS[6], id)
  if redis.call('EXISTS', KEYS[1]) == 0 then
    redis.call('DEL', KEYS[3])
  end
  announce(why, id)
end

local function purge(now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
    drop(id, 'expired')
  end
end

local function fence_and_holder(id)
  return string.match(redis.call('HGET', KEYS[2], id) or '', '^{"fence":(%d+),"holder":"(%x+)"')
end
