-- End a lease at once, if the caller still holds it.
--
--   KEYS: as listed in _registry.lua
--   ARGV[1] member id, ARGV[2] its fence
--
-- Answers 1, or 0 when the caller holds no lease.

purge(now_ms())

if fence_of(ARGV[1]) ~= ARGV[2] then
  return 0
end
drop(ARGV[1], 'left')
return 1
