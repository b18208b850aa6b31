-- Take a member out of its service, and let its holder know with its next renewal.
--
--   KEYS: as listed in _registry.lua
--   ARGV[1] member id
--
-- Answers 1, or 0 when there is no such member.

purge(now_ms())

if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then
  return 0
end
local _, holder = fence_and_holder(ARGV[1])
redis.call('HSET', KEYS[8], ARGV[1], holder or '')
drop(ARGV[1], 'drained')
return 1
