-- End a lease at once, if the caller still holds it.
--
--   KEYS[1] leases   sorted set, member id -> deadline in ms
--   KEYS[2] records  hash, member id -> JSON of the member
--   KEYS[3] beats    hash, member id -> its fence, times and state
--   KEYS[4] state    hash, the generation and all that is said of it
--   KEYS[5] events   stream of {event = JSON}
--   ARGV[1] member id, ARGV[2] its fence, ARGV[3] lease in ms
--
-- Answers 1, or 0 when there was nothing of the caller's to end.

purge((tick(tonumber(ARGV[3]), 0)))

if not is_held() then
  return 0
end
if has('members', ARGV[1]) then
  add('left', ARGV[1])
end
drop(ARGV[1], 'left')
return 1
