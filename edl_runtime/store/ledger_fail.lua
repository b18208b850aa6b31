-- Return a leased shard that could not be read, or set it aside when it has failed too often.
--
--   KEYS: as listed in _ledger.lua
--   ARGV[1] generation, ARGV[2] worker, ARGV[3] ticket, ARGV[4] records of it that are applied, ARGV[5] reason
--
-- Answers {'ok', failures so far}, 0 when the worker does not hold it, as in a repeated call; {'missing'};
-- {'stale', generation}.

local state = read_state()
local refused = refusal(state, ARGV[1])
if refused then
  return refused
end

local lease = redis.call('HGET', KEYS[2], ARGV[3])
if not lease then
  return {'ok', 0}
end
local start, worker = parse(lease)
if worker ~= ARGV[2] then
  return {'ok', 0}
end
local count = fail(state, ARGV[3], math.max(start, tonumber(ARGV[4])), ARGV[5])
keep()
return {'ok', count}
