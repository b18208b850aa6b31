-- End a lease at once, if the caller still holds it.
--
--   KEYS: as listed in _registry.lua
--   ARGV[1] member id, ARGV[2] its holder's random name
--
-- Answers 1, or 0 when the caller holds no lease.

purge(now_ms())

local _, holder = fence_and_holder(ARGV[1])
if holder ~= ARGV[2] then
  return 0
end
drop(ARGV[1], 'left')
return 1
