-- Read what the members last reported.
--
--   KEYS: as listed in _registry.lua
--
-- Answers {now in ms, ms since a member joined or left or -1 if unknown, member ids, for each the JSON of its
-- report, or '' for none, or for what is too long}.

local now = now_ms()
purge(now)

local ids = redis.call('ZRANGE', KEYS[1], 0, MOST_MEMBERS - 1)
local reports, room = {}, MOST_BYTES
for place, id in ipairs(ids) do
  local report = redis.call('HGET', KEYS[6], id) or ''
  reports[place] = #report <= room and report or ''
  room = room - #reports[place]
end
local changed = redis.call('HGET', KEYS[7], 'changed')
return {now, changed and now - changed or -1, ids, reports}
