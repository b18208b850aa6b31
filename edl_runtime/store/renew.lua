-- Renew a lease, and store its holder's report. An expired lease is not renewed.
--
--   KEYS: as listed in _registry.lua
--   ARGV[1] member id, ARGV[2] its holder's random name, ARGV[3] lease in ms,
--   ARGV[4] JSON object of its report, '' for none
--
-- Answers the fence, which is a later one when the answer to the holder's last registration was lost; 'gone' when there
-- is no such member; 'taken' when the id has a later holder; 'drained' when this holder is to end. The fence does not
-- tell who holds the id: after a failover that lost a registration it may have been given again.

local now = now_ms()
purge(now)

if redis.call('HGET', KEYS[8], ARGV[1]) == ARGV[2] then
  keep()
  return 'drained'
end
local fence, holder = fence_and_holder(ARGV[1])
if not fence then
  return 'gone'
end
if holder ~= ARGV[2] then
  return 'taken'
end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[6], ARGV[1], string.format('{"at":%.3f,', now / 1000) .. string.sub(ARGV[4], 2))
end
keep()
return fence
