-- Count a trainer that ended and was not to, and return how many have without progress in between.
-- Those of several instances in one generation are one: when a rank ends, others may because of it.
--
-- KEYS[1] falls   hash: run, step (the highest of all falls), generation (of the last), before (falls of earlier ones),
--                 most (falls of one instance in this one), instance:N (those of instance N in this one)
-- ARGV    run, instance, generation (0 for none), step, progress ("1": there was some whatever the step), how long kept
--         in ms

local run, instance, generation, step = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local known = redis.call("HMGET", KEYS[1], "run", "step", "generation", "before", "most", "instance:" .. instance)
local highest, before, most, own = tonumber(known[2]), tonumber(known[4]), tonumber(known[5]), tonumber(known[6] or 0)

local progress = known[1] ~= run or ARGV[5] == "1" or step > highest
if progress or generation ~= known[3] then
  redis.call("DEL", KEYS[1])
  before, most, own = progress and 0 or before + most, 0, 0
end
own = own + 1
most = math.max(most, own)
highest = known[1] == run and math.max(step, highest) or step
redis.call("HSET", KEYS[1], "run", run, "step", highest, "generation", generation, "before", before, "most", most)
redis.call("HSET", KEYS[1], "instance:" .. instance, own)
redis.call("PEXPIRE", KEYS[1], ARGV[6])
return before + most
