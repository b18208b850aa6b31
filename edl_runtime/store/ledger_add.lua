-- Append shards to a stream. Shards that it already has are skipped, so the call can be repeated.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] number of the first shard given, ARGV[2] on: their names
--
-- Answers {'ok'}; {'gap', added} when numbers before the first are missing; {'differs', number} when that number has
-- another name; {'closed', added} when the stream is closed.

local state = read_state()
local added, first = state.added or 0, tonumber(ARGV[1])
if first > added then
  return {'gap', added}
end
local last = first + #ARGV - 2
if last >= added and state.closed == 1 and #ARGV > 1 then
  return {'closed', added}
end
for place = 2, #ARGV do
  local number = first + place - 2
  local known = redis.call('HGET', KEYS[6], whole(number))
  if known and known ~= ARGV[place] then
    return {'differs', number}
  end
end
for place = 2, #ARGV do
  redis.call('HSET', KEYS[6], whole(first + place - 2), ARGV[place])
end
redis.call('HSET', KEYS[1], 'added', whole(math.max(added, last + 1)))
keep()
return {'ok'}
