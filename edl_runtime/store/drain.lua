-- Take a member out of its service, and let its holder know with its next renewal.
--
--   KEYS: as listed in _registry.lua
--   ARGV[1] member id
--
-- Answers 1, or 0 when there is no such member.

purge(now_ms())

local record = redis.call('HGET', KEYS[2], ARGV[1])
if not record then
  return 0
end
redis.call('HSET', KEYS[8], ARGV[1], string.match(record, '^{"fence":%d+,"holder":"(%x+)"') or '')
drop(ARGV[1], 'drained')
return 1
