-- Stands at the head of every script of a ledger: whose generation counts, and what sets a shard aside.
--
-- A ticket is one shard in one epoch: they are handed out in order, epoch * added + place in the epoch. Each below
-- `next` is in doing, back or acked, or else it is done for good or was dropped, for it failed too often.
--
--   KEYS[1] state     hash: generation, digest, added, closed, epochs, epoch, next, dropped, limit, committed, history,
--                     parts
--   KEYS[2] doing     hash, ticket -> "START WORKER": a lease, and the record that it began at
--   KEYS[3] back      sorted set, ticket -> record to begin at: leased before, and to be leased again
--   KEYS[4] acked     sorted set, "TICKET START" -> step that applied its last record, not before the last commit's
--   KEYS[5] failures  hash, ticket -> JSON {"reasons": [...], "offset": records that had been applied}
--   KEYS[6] names     hash, number -> name of a shard; empty when all workers were given the list
--   KEYS[7] answers   hash, worker -> number of the last call that leased it something, and the tickets

local FIELDS = {'generation', 'added', 'closed', 'epochs', 'epoch', 'next', 'dropped', 'limit'}

local function whole(number)
  return string.format('%.0f', number)
end

-- How many keys there are besides the state: an empty one is none.
local function count_parts()
  return redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7])
end

-- Redis keeps a ledger for a week from its last use; its checkpoints hold all that it takes to restore it. What changes
-- it ends with this, for the next script counts its parts again.
local function keep()
  redis.call('HSET', KEYS[1], 'parts', count_parts())
  for _, key in ipairs({KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]}) do
    redis.call('EXPIRE', key, 604800)
  end
end

-- A Redis that evicts takes one key at a time. When one is gone, the others go as well, as if all had been forgotten at
-- once. What is true without them stays: the generation, and how many shards a stream has if their names are there.
local function read_state()
  local state = {}
  for place, value in ipairs(redis.call('HMGET', KEYS[1], 'parts', unpack(FIELDS))) do
    state[FIELDS[place - 1] or 'parts'] = tonumber(value or nil)
  end
  if count_parts() ~= (state.parts or 0) then
    local left = {generation = state.generation}
    if state.added and redis.call('EXISTS', KEYS[6]) == 1 then
      left.added, left.closed = state.added, state.closed
    else
      redis.call('DEL', KEYS[6])
    end
    redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[7])
    for field, value in pairs(left) do
      redis.call('HSET', KEYS[1], field, whole(value))
    end
    keep()
    return left
  end
  return state
end

-- Whether there is no ledger, or one that lacks a number, or that may be older than what its workers know.
local function is_missing(state)
  for _, field in ipairs(FIELDS) do
    if not state[field] then
      return true
    end
  end
  local kept = redis.call('HMGET', KEYS[1], 'committed', 'history')
  return not tonumber(kept[1] or nil) or kept[2] ~= history()
end

-- Answers why the caller may change nothing, or nil.
local function refusal(state, generation)
  if is_missing(state) then
    return {'missing'}
  end
  if state.generation ~= tonumber(generation) then
    return {'stale', state.generation}
  end
end

-- Answers where a lease began, and whose it is.
local function parse(lease)
  local start, worker = string.match(lease, '^(%d+) (.*)$')
  return tonumber(start), worker
end

local function failures_of(ticket)
  local record = redis.call('HGET', KEYS[5], ticket)
  return record and cjson.decode(record) or {reasons = {}, offset = 0}
end

local function drop()
  redis.call('HINCRBY', KEYS[1], 'dropped', 1)
end

-- End a lease by a failure: it goes back, or is dropped at its last one. Answers how many there have been.
local function fail(state, ticket, offset, reason)
  local record = failures_of(ticket)
  table.insert(record.reasons, reason)
  record.offset = offset
  redis.call('HSET', KEYS[5], ticket, cjson.encode(record))
  redis.call('HDEL', KEYS[2], ticket)
  if #record.reasons >= state.limit then
    drop()
  else
    redis.call('ZADD', KEYS[3], offset, ticket)
  end
  return #record.reasons
end

-- Flat pairs of ticket and offset, from ARGV[first] on, as a table.
local function positions_from(first)
  local positions = {}
  for place = first, #ARGV, 2 do
    positions[ARGV[place]] = tonumber(ARGV[place + 1])
  end
  return positions
end

-- What steps after `step` finished, as {member, ticket, offset at that step}.
local function acked_after(step, positions)
  local found = {}
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '(' .. step, '+inf')) do
    local ticket, start = string.match(member, '^(%d+) (%d+)$')
    table.insert(found, {member, ticket, math.max(positions[ticket] or 0, tonumber(start))})
  end
  return found
end
