-- Read what the members last reported.
--
--   KEYS[1] leases    sorted set, member id -> deadline in ms
--   KEYS[2] records   hash, member id -> JSON of the member with its fence
--   KEYS[3] contract  string, JSON of the signature that all members share
--   KEYS[4] events    stream of {joined|left|expired = member id}
--   KEYS[5] fence     counter, the last fencing token
--   KEYS[6] reports   hash, member id -> JSON of what it last reported, beginning {"at":SECONDS of the clock
--   KEYS[7] clock     hash: wall and clock, by which leases run, and changed: when somebody came or went
--
-- Answers {now in ms, ms since somebody came or went or -1 if that is not known, member ids, for each the JSON of its
-- report or ''}.

local now = now_ms()
purge(now)

local ids = redis.call('ZRANGE', KEYS[1], 0, -1)
local reports = {}
for place, id in ipairs(ids) do
  reports[place] = redis.call('HGET', KEYS[6], id) or ''
end
local changed = redis.call('HGET', KEYS[7], 'changed')
return {now, changed and now - changed or -1, ids, reports}
