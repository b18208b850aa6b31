-- Let this generation change the ledger, and no earlier one. The number never goes back.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] generation, ARGV[2] worker, ARGV[3] a generation that has begun, as the worker knows: this is another, older
--   ledger if it has not, as in a master that was replaced and still runs
--
-- Answers {'ok', the tickets that the worker holds ...}; {'missing'}; {'stale', generation} when a later one has begun.

local state = read_state()
if is_missing(state) or state.generation < tonumber(ARGV[3]) then
  return {'missing'}
end
if state.generation > tonumber(ARGV[1]) then
  return {'stale', state.generation}
end
redis.call('HSET', KEYS[1], 'generation', ARGV[1])
keep()
local answer = {'ok'}
local doing = redis.call('HGETALL', KEYS[2])
for place = 1, #doing, 2 do
  local _, worker = parse(doing[place + 1])
  if worker == ARGV[2] then
    table.insert(answer, doing[place])
  end
end
return answer
