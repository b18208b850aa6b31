-- Register a member, with a fencing token larger than all before it. Replaces an earlier member of the same id.
--
--   KEYS: as listed in _registry.lua
--   ARGV[1] member id, ARGV[2] lease in ms, ARGV[3] JSON object of the member without fence,
--   ARGV[4] JSON of its signature, '' for none
--
-- Answers {1, fence}; or {0, contract, ms} when the members have another contract; their leases, unless renewed, will
-- have expired in that many ms.

local now = now_ms()
purge(now)

if ARGV[4] ~= '' then
  local contract = redis.call('GET', KEYS[3])
  if contract and contract ~= ARGV[4] then
    local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
    return {0, contract, last[2] - now}
  end
  redis.call('SET', KEYS[3], ARGV[4])
end

local fence = redis.call('INCR', KEYS[5])
if fence == 1 then -- a new or expired name: start from the clock, above every token that it may have had before
  fence = now
  redis.call('SET', KEYS[5], string.format('%.0f', fence))
end

redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], string.format('{"fence":%.0f,', fence) .. string.sub(ARGV[3], 2))
redis.call('HDEL', KEYS[6], ARGV[1])
redis.call('HDEL', KEYS[8], ARGV[1])
announce('joined', ARGV[1])
return {1, fence}
