-- Count a worker that failed, and return the number of failures without progress in between.
-- Failures of several instances in one generation count once: when one rank ends, others may fail because of it. They
-- count while one of the agents that reported them is registered, so those of an earlier run don't.
--
--   KEYS: as listed in _group.lua
--   State field failures: JSON of {step (the highest so far), generation (of the last), before (failures of earlier
--   generations), most (failures of one member in this one), own (member id -> its failures in this one),
--   reported_by (member id -> true), count (before and most together), instance and reason (of the last)}
--   ARGV[1] id of the worker's agent, ARGV[2] its fence, ARGV[3] lease in ms, ARGV[4] generation (0 for none),
--   ARGV[5] step of the job, ARGV[6] '1' if there was progress, whatever the step, ARGV[7] why it failed
--
-- Answers the count, this one included.

purge((tick(tonumber(ARGV[3]), 0)))

local id, generation, step = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5])
local failures = cjson.decode(get('failures') or '{"step": -1, "reported_by": {}}')
local known = false
for member in pairs(failures.reported_by) do
  known = known or beat_of(member) ~= nil
end

if not known or ARGV[6] == '1' or step > failures.step then
  failures = {step = known and math.max(step, failures.step) or step, before = 0, most = 0, own = {}, reported_by = {}}
elseif generation ~= failures.generation then
  failures.before, failures.most, failures.own = failures.before + failures.most, 0, {}
end
failures.generation = generation
failures.reported_by[id] = true
failures.own[id] = (failures.own[id] or 0) + 1
failures.most = math.max(failures.most, failures.own[id])
failures.count = failures.before + failures.most
failures.instance, failures.reason = index_of(id), ARGV[7]
set('failures', cjson.encode(failures))
keep()
return failures.count
