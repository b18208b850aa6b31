-- End a lease at once, if the caller still holds it.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] member id, ARGV[2] its fence, ARGV[3] lease in ms
--
-- Answers 1, or 0 when the caller holds no lease.

purge((tick(tonumber(ARGV[3]), 0)))

if not is_held() then
  return 0
end
if has('members', ARGV[1]) then
  add('left', ARGV[1])
end
drop(ARGV[1], 'left')
return 1
