-- Count a trainer that ended and was not to, and return how many have without progress in between.
-- Several of one generation are one: when a rank ends, others may because of it.
--
-- KEYS[1] falls   hash: run, step (the highest of all falls), generation (of the last), count
-- ARGV    run, generation (0 for none), step, progress ("1": there was some whatever the step), how long kept in ms

local run, generation, step, progress = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == "1"
local known = redis.call("HMGET", KEYS[1], "run", "step", "generation", "count")
local count, highest = 0, 0
if known[1] == run then
  count, highest = tonumber(known[4]), tonumber(known[2])
  if generation > 0 and generation == tonumber(known[3]) then
    return count
  end
end
if progress or step > highest then
  count = 0
end
redis.call(
  "HSET", KEYS[1], "run", run, "step", math.max(step, highest), "generation", generation, "count", count + 1
)
redis.call("PEXPIRE", KEYS[1], ARGV[5])
return count + 1
