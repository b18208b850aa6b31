-- Ask the trainers for a checkpoint at their next step.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] after how many ms without a heartbeat no agent lives: the group's clock stops without them, so leases don't tell
--
-- Answers the request's number, larger than those of all before it; 'unknown' when there is no group of that name, 'ended'
-- when the job has ended, 'absent' when no agent lives, 'early' when no script has called elastic.init, 'keeps none' when
-- none keeps checkpoints.

if redis.call('EXISTS', KEYS[4]) == 0 then
  return 'unknown'
end
if get('outcome') then
  return 'ended'
end
local time = redis.call('TIME')
if math.abs(time[1] * 1000 + math.floor(time[2] / 1000) - number('wall')) > tonumber(ARGV[1]) then
  return 'absent'
end
local now = tick(number('ttl'), 0)
purge(now)
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 'absent'
end

local called, keeps = false, false
for _, record in ipairs(redis.call('HVALS', KEYS[2])) do
  local is_json, member = pcall(cjson.decode, record)
  if is_json and type(member) == 'table' and member.called then
    called = true
    keeps = keeps or member.keeps
  end
end
if not (called and keeps) then
  return called and 'keeps none' or 'early'
end

local request = math.max(now, number('checkpoint_asked') + 1)
set('checkpoint_asked', request, 'checkpoint_asked_in', number('current'))
announce('asked', {generation = number('current'), reason = 'a checkpoint at the next step'})
return string.format('%.0f', request)
