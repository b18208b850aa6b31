-- Read the members, and since when the news begins that a reader of the list has not had.
--
--   KEYS[1] leases    sorted set, member id -> deadline in ms
--   KEYS[2] records   hash, member id -> JSON of the member with its fence
--   KEYS[3] contract  string, JSON of the signature that all members share
--   KEYS[4] events    stream of {joined|left|expired = member id}
--   KEYS[5] fence     counter, the last fencing token
--   KEYS[6] reports   hash, member id -> JSON of what it last reported, beginning {"at":SECONDS of the clock
--   KEYS[7] clock     hash: wall and clock, by which leases run, and changed: when somebody came or went
--
-- Answers {records, contract or '', ms until the first lease runs out or -1, id of the oldest event, of the newest};
-- '0-0' for both without events.

local now = now_ms()
purge(now)

local wait_ms = -1
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if first[2] then
  wait_ms = first[2] - now
end
local oldest = redis.call('XRANGE', KEYS[4], '-', '+', 'COUNT', 1)[1] or {'0-0'}
local newest = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1] or {'0-0'}
return {redis.call('HVALS', KEYS[2]), redis.call('GET', KEYS[3]) or '', wait_ms, oldest[1], newest[1]}
