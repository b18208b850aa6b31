-- Prepended to every script of a trainer group: its clock, its leases and its members' heartbeats.
--
--   KEYS[1] leases   sorted set, member id -> deadline in ms of the group's clock
--   KEYS[2] records  hash, member id -> JSON of the member
--   KEYS[3] beats    hash, member id -> JSON of its last heartbeat: fence, at and since (ms of the clock), status, lost, up,
--                    stepped, paused_in; pause after any training, late after the second heartbeat, both in ms
--   KEYS[4] state    hash: run, ttl (a lease in ms), overtime (ms that leases last longer), overtime_at (of this clock),
--                    late_announced, fence, wall, clock, quiet_until, number (the highest), generation (JSON), current
--                    (its number), members, formed, since, proposed_at, resumed, finished, left, suspected_*, stop,
--                    outcome, waits, saved and saved_at (the last checkpoint), size (of the last generation that has
--                    trained), resized (JSON of the last change of members), checkpoint_asked (the number of the last request),
--                    checkpoint_asked_in (the generation then), checkpoint_answered, checkpoint_answer (the JSON of an
--                    event), slow (stragglers, as ID=TIMES), failures, history
--   KEYS[5] events   stream of {event = JSON}, the last 2,000 or so
--   KEYS[6] calls    channel: the kind of each event on which all agents act at once
--   KEYS[7] news     channel: the kind of each other event, for the agents that decide what is next
--   ARGV[1] member id, ARGV[2] its fence (0 before it has one), ARGV[3] lease in ms

-- Advances by at most a third of a lease per call: no lease expires while Redis or all agents are suspended.
local function tick(ttl, known)
  return tick_of(KEYS[4], math.floor(ttl / 3), known)
end

local function get(field)
  return redis.call('HGET', KEYS[4], field)
end

local function number(field)
  return tonumber(get(field) or 0)
end

local function set(...)
  redis.call('HSET', KEYS[4], ...)
end

local function unset(...)
  redis.call('HDEL', KEYS[4], ...)
end

local function keep()
  for _, key in ipairs({KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]}) do
    redis.call('EXPIRE', key, 86400)
  end
end

-- Events on which all agents act at once. All others are for those that decide what is next.
local CALLS = {forming = true, suspected = true, asked = true, stop = true, ended = true, restored = true}

local function announce_json(kind, json)
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', 2000, '*', 'event', json)
  redis.pcall('PUBLISH', KEYS[CALLS[kind] and 6 or 7], kind) -- without permission agents see it with their next heartbeat
  keep()
end

local function announce(kind, event)
  event.kind = kind
  announce_json(kind, cjson.encode(event))
end

local function index_of(id)
  return tonumber(string.match(id, '^%d+'))
end

local function indexes(ids)
  local found = {}
  for id in string.gmatch(ids, '%S+') do
    found[#found + 1] = index_of(id)
  end
  return found
end

local function announce_of(kind, id)
  announce(kind, {instance = index_of(id), generation = number('current')})
end

-- Whether a field that holds ids holds this one.
local function has(field, id)
  return string.find(' ' .. (get(field) or '') .. ' ', ' ' .. id .. ' ', 1, true) ~= nil
end

local function add(field, id)
  if not has(field, id) then
    local ids = get(field)
    set(field, ids and ids ~= '' and ids .. ' ' .. id or id)
  end
end

local function drop(id, why)
  redis.call('ZREM', KEYS[1], id)
  redis.call('HDEL', KEYS[2], id)
  redis.call('HDEL', KEYS[3], id)
  announce_of(why, id)
end

-- Remove the members whose lease and overtime have expired.
local function purge(now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - number('overtime'))) do
    drop(id, 'gone')
  end
end

-- Returns nil for a record that can't be read: an error here would fail the heartbeats of all members.
local function beat_of(id)
  local is_json, beat = pcall(cjson.decode, redis.call('HGET', KEYS[3], id) or '')
  if not is_json or type(beat) ~= 'table' then
    return nil
  end
  for _, field in ipairs({'fence', 'at', 'since', 'lost', 'up', 'stepped', 'paused_in'}) do
    if type(beat[field]) ~= 'number' then
      return nil
    end
  end
  for _, field in ipairs({'pause', 'late'}) do
    beat[field] = type(beat[field]) == 'number' and beat[field] or nil
  end
  return beat
end

-- Whether the caller holds a lease with this fence.
local function is_held()
  local beat = beat_of(ARGV[1])
  return beat ~= nil and beat.fence == tonumber(ARGV[2])
end
