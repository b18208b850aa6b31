-- Read the members, and the range of events that cover their changes.
--
--   KEYS: as listed in _registry.lua
--
-- Answers {records, contract or '', ms until the first lease expires or -1, id of the oldest event, of the newest};
-- '0-0' for both without events. What is too long is left out.

local now = now_ms()
purge(now)

local wait_ms = -1
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if first[2] then
  wait_ms = first[2] - now
end
local oldest = redis.call('XRANGE', KEYS[4], '-', '+', 'COUNT', 1)[1] or {'0-0'}
local newest = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1] or {'0-0'}
local records, room = {}, MOST_BYTES
for _, record in ipairs(redis.call('HVALS', KEYS[2])) do
  if #records < MOST_MEMBERS and #record <= room then
    room = room - #record
    records[#records + 1] = record
  end
end
return {records, redis.call('GETRANGE', KEYS[3], 0, MOST_BYTES), wait_ms, oldest[1], newest[1]}
