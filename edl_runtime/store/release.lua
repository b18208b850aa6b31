-- End a lease at once, if the caller still holds it.
--
--   KEYS[1] leases    sorted set, member id -> deadline in ms
--   KEYS[2] records   hash, member id -> JSON of the member with its fence
--   KEYS[3] contract  string, JSON of the signature that all members share
--   KEYS[4] events    stream of {joined|left|expired = member id}
--   KEYS[5] fence     counter, the last fencing token
--   KEYS[6] reports   hash, member id -> JSON of what it last reported, beginning {"at":SECONDS of the clock
--   KEYS[7] clock     hash: wall and clock, by which leases run, and changed: when somebody came or went
--   ARGV[1] member id, ARGV[2] its fence
--
-- Answers 1 if it did, 0 if there was nothing of the caller's to end.

purge(now_ms())

if fence_of(ARGV[1]) ~= ARGV[2] then
  return 0
end
drop(ARGV[1], 'left')
return 1
