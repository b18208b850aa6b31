-- Read what the members last reported.
--
--   KEYS[1] leases    sorted set, member id -> deadline in ms
--   KEYS[2] records   hash, member id -> JSON of the member with its fence
--   KEYS[3] contract  string, JSON of the signature that all members share
--   KEYS[4] events    stream of {joined|left|expired = member id}
--   KEYS[5] fence     counter, the last fencing token
--   KEYS[6] said      hash, member id -> JSON of what it last reported, beginning {"at":SECONDS of Redis's clock
--
-- Answers {now in ms, ms since somebody came or went or -1 if that is not known, member ids, for each the JSON of its
-- report or ''}.

local now = now_ms()
purge(now)

local ids = redis.call('ZRANGE', KEYS[1], 0, -1)
local said = {}
for place, id in ipairs(ids) do
  said[place] = redis.call('HGET', KEYS[6], id) or ''
end
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
return {now, last and now - string.match(last[1], '^%d+') or -1, ids, said}
