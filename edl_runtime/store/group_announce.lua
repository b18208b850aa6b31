-- Add to the job's events. `waiting` is added once per reason and generation, `saved` once per checkpoint: an agent that
-- got no answer repeats it.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] member id, ARGV[2] its fence, ARGV[3] lease in ms, ARGV[4] JSON of the event, ARGV[5] its kind,
--   ARGV[6] its reason, ARGV[7] the number of the request for a checkpoint that it answers, 0 for none,
--   ARGV[8] how many ms ago it happened

if tonumber(ARGV[7]) > number('checkpoint_answered') then
  set('checkpoint_answered', ARGV[7], 'checkpoint_answer', ARGV[4])
end
if (ARGV[5] == 'waiting' and get('waits') == ARGV[6]) or (ARGV[5] == 'saved' and get('saved') == ARGV[4]) then
  return 0
end
local ago, told = tonumber(ARGV[8]), ARGV[4]
if ago > 0 then
  told = string.sub(told, 1, -2) .. ',"delay_s":' .. ago / 1000 .. '}'
end
announce_json(ARGV[5], told)
if ARGV[5] == 'waiting' then
  set('waits', ARGV[6])
elseif ARGV[5] == 'saved' then
  local time = redis.call('TIME')
  set('saved', ARGV[4], 'saved_at', time[1] * 1000 + math.floor(time[2] / 1000) - ago)
end
return 1
