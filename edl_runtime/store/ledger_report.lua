-- Count the shards by state.
--
--   KEYS: as listed in _ledger.lua
--
-- Answers {'ok', generation, added, closed, epochs, epoch, next, dropped, limit, committed, doing, back, acked,
-- failures as flat pairs}; {'missing'}.

local state = read_state()
if is_missing(state) then
  return {'missing'}
end
local answer = {'ok'}
for _, field in ipairs(FIELDS) do
  table.insert(answer, state[field])
end
local committed = redis.call('HGET', KEYS[1], 'committed')
table.insert(answer, tonumber(committed))
table.insert(answer, redis.call('HLEN', KEYS[2]))
table.insert(answer, redis.call('ZCARD', KEYS[3]))
table.insert(answer, redis.call('ZCOUNT', KEYS[4], '(' .. committed, '+inf'))
table.insert(answer, redis.call('HGETALL', KEYS[5]))
return answer
