-- Count a trainer that ended and was not to, and return how many have without progress in between.
-- Those of several instances in one generation are one: when a rank ends, others may because of it. Falls count for as
-- long as one of the agents that told of them is registered, so those of an earlier run do not.
--
--   KEYS[1] leases   sorted set, member id -> deadline in ms
--   KEYS[2] records  hash, member id -> JSON of the member
--   KEYS[3] beats    hash, member id -> its fence, times and state
--   KEYS[4] state    hash, the generation and all that is said of it; here falls: JSON of {step (the highest of all),
--                    generation (of the last), before (falls of earlier ones), most (falls of one member in this one),
--                    own (member id -> its falls in this one), told (member id -> true)}
--   KEYS[5] events   stream of {event = JSON}
--   ARGV[1] id of whose trainer it was, ARGV[2] its fence, ARGV[3] lease in ms, ARGV[4] generation (0 for none),
--   ARGV[5] step of the job, ARGV[6] '1': there was progress whatever the step
--
-- Answers the count, this one included.

purge((tick(tonumber(ARGV[3]), 0)))

local id, generation, step = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5])
local falls = cjson.decode(get('falls') or '{"step": -1, "told": {}}')
local known = false
for member in pairs(falls.told) do
  known = known or beat_of(member) ~= nil
end

if not known or ARGV[6] == '1' or step > falls.step then
  falls = {step = known and math.max(step, falls.step) or step, before = 0, most = 0, own = {}, told = {}}
elseif generation ~= falls.generation then
  falls.before, falls.most, falls.own = falls.before + falls.most, 0, {}
end
falls.generation = generation
falls.told[id] = true
falls.own[id] = (falls.own[id] or 0) + 1
falls.most = math.max(falls.most, falls.own[id])
set('falls', cjson.encode(falls))
keep()
return falls.before + falls.most
