-- Read the members, and the range of events that cover their changes.
--
--   KEYS: as listed in _registry.lua
--
-- Answers {records, contract or '', ms until the first lease expires or -1, id of the oldest event, of the newest};
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
