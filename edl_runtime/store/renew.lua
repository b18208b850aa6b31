-- Put off the end of a lease, and keep what its holder reports. A lease that has run out stays so.
--
--   KEYS[1] leases    sorted set, member id -> deadline in ms
--   KEYS[2] records   hash, member id -> JSON of the member with its fence
--   KEYS[3] contract  string, JSON of the signature that all members share
--   KEYS[4] events    stream of {joined|left|expired = member id}
--   KEYS[5] fence     counter, the last fencing token
--   KEYS[6] reports   hash, member id -> JSON of what it last reported, beginning {"at":SECONDS of the clock
--   KEYS[7] clock     hash: wall and clock, by which leases run, and changed: when somebody came or went
--   ARGV[1] member id, ARGV[2] its fence, ARGV[3] lease in ms, ARGV[4] JSON object of its report, '' for none,
--   ARGV[5] the holder's random name: its record begins {"fence":N,"holder":"NAME",
--
-- Answers the fence, a later one when the holder was not answered as it registered last; 'gone' when there is no such
-- member; 'taken' when the id has a later holder.

local now = now_ms()
purge(now)

local fence = fence_of(ARGV[1])
if not fence then
  return 'gone'
end
if fence ~= ARGV[2] then
  local record = redis.call('HGET', KEYS[2], ARGV[1])
  if not string.match(record, '^{"fence":%d+,"holder":"' .. ARGV[5] .. '"') then
    return 'taken'
  end
end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[6], ARGV[1], string.format('{"at":%.3f,', now / 1000) .. string.sub(ARGV[4], 2))
end
keep()
return fence
