-- Add to the job's events. What it waits for is said once, until there is another generation; that a checkpoint is
-- saved, once: whoever got no answer says so again.
--
--   KEYS[1] leases   sorted set, member id -> deadline in ms
--   KEYS[2] records  hash, member id -> JSON of the member
--   KEYS[3] beats    hash, member id -> its fence, times and state
--   KEYS[4] state    hash, the generation and all that is said of it
--   KEYS[5] events   stream of {event = JSON}
--   ARGV[1] member id, ARGV[2] its fence, ARGV[3] lease in ms, ARGV[4] JSON of the event, ARGV[5] its kind,
--   ARGV[6] its reason

if ARGV[5] == 'waiting' then
  if get('waits') == ARGV[6] then
    return 0
  end
  set('waits', ARGV[6])
elseif ARGV[5] == 'saved' then
  if get('saved') == ARGV[4] then
    return 0
  end
  set('saved', ARGV[4])
end
announce_json(ARGV[4])
return 1
