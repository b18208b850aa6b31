-- Read what the members last reported.
--
--   KEYS: as listed in _registry.lua
--
-- Answers {now in ms, ms since a member joined or left or -1 if unknown, member ids, for each the JSON of its
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
