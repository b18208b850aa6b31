-- Prepended to every script of a ledger: which generation may change it, and when a shard is set aside.
--
-- A ticket is one shard in one epoch: epoch * added + its place in the epoch. Tickets are leased in order. Each below
-- `next` is in doing, back or acked; if in none, it is done, or was dropped because it failed too often.
--
--   KEYS[1] state     hash: generation, digest, added, closed, epochs, epoch, next, dropped, limit, committed, history,
--                     parts
--   KEYS[2] doing     hash, ticket -> "START WORKER": a lease, and the record that it began at
--   KEYS[3] back      sorted set, ticket -> record to begin at: leased before, and to be leased again
--   KEYS[4] acked     sorted set, "TICKET START" -> step that applied its last record, not before the last commit's
--   KEYS[5] failures  hash, ticket -> JSON {"reasons": [...], "offset": records that had been applied}
--   KEYS[6] names     hash, number -> name of a shard; empty when all workers were given the list
--   KEYS[7] answers   hash, worker -> number of the last call that leased it something, and the tickets
--
-- A queue of tasks (the scripts ledger_task_*) has keys of its own. There a ticket is one task in one pass, and belongs to
-- no checkpoint. Its history is 'any': what Redis has after a restart is used. A lease is "0 SINCE ENDS TOKEN WORKER", in
-- ms of the clock in the state; names are JSON of each task's shards; KEYS[7] has the tokens of a worker's last reports.

local FIELDS = {'generation', 'added', 'closed', 'epochs', 'epoch', 'next', 'dropped', 'limit'}

local function whole(number)
  return string.format('%.0f', number)
end

-- How many keys exist besides the state; Redis removes empty ones.
local function count_parts()
  return redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7])
end

-- Keep the ledger for a week; a checkpoint can restore it later. Every script that changes it must end with this, because
-- the next one compares the number of keys (see read_state).
local function keep()
  redis.call('HSET', KEYS[1], 'parts', count_parts())
  for _, key in ipairs({KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]}) do
    redis.call('EXPIRE', key, 604800)
  end
end

-- A full Redis may evict single keys. When one is missing, remove the others too, so that the ledger counts as lost. Keep
-- what is still valid: the generation, and the number of a stream's shards if their names are there. Of a queue of tasks
-- nothing is kept.
local function read_state()
  local state = {}
  for place, value in ipairs(redis.call('HMGET', KEYS[1], 'parts', unpack(FIELDS))) do
    state[FIELDS[place - 1] or 'parts'] = tonumber(value or nil)
  end
  if count_parts() ~= (state.parts or 0) then
    if redis.call('HGET', KEYS[1], 'history') == 'any' then
      redis.call('DEL', unpack(KEYS))
      return {}
    end
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

-- Whether the ledger is missing or incomplete, or Redis has restarted since and may have lost the last writes.
local function is_missing(state)
  for _, field in ipairs(FIELDS) do
    if not state[field] then
      return true
    end
  end
  local kept = redis.call('HMGET', KEYS[1], 'committed', 'history')
  return not tonumber(kept[1] or nil) or kept[2] ~= 'any' and kept[2] ~= history()
end

-- Returns why the caller may not change the ledger, or nil.
local function refusal(state, generation)
  if is_missing(state) then
    return {'missing'}
  end
  if state.generation ~= tonumber(generation) then
    return {'stale', state.generation}
  end
end

-- Returns the first record of a lease, and its worker.
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

-- End a lease after a failure: the shard can be leased again, or is dropped. Returns the number of failures.
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

-- The shards finished by steps after `step`, as {member, ticket, offset at that step}.
local function acked_after(step, positions)
  local found = {}
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '(' .. step, '+inf')) do
    local ticket, start = string.match(member, '^(%d+) (%d+)$')
    table.insert(found, {member, ticket, math.max(positions[ticket] or 0, tonumber(start))})
  end
  return found
end

-- The state of a queue whose list is complete, or nil.
local function read_queue()
  local state = read_state()
  if redis.call('HGET', KEYS[1], 'history') == 'any' and not is_missing(state) and state.closed == 1 then
    return state
  end
end

-- Fail the tasks whose time is over. Returns the time, and the tickets of the others by their tokens.
local function end_late_tasks(state)
  local now = tick_of(KEYS[1], math.huge, 0)
  local tickets = {}
  local doing = redis.call('HGETALL', KEYS[2])
  for place = 1, #doing, 2 do
    local since, ends, token, worker = string.match(doing[place + 1], '^0 (%d+) (%d+) (%x+) (.*)$')
    if tonumber(ends) <= now then
      fail(state, doing[place], 0, string.format('%s did not finish it in %g s', worker, (ends - since) / 1000))
    else
      tickets[token] = doing[place]
    end
  end
  return now, tickets
end

-- The tickets of tasks that failed too often in the current pass.
local function failed_tasks()
  local tickets = {}
  for _, ticket in ipairs(redis.call('HKEYS', KEYS[5])) do
    if redis.call('HEXISTS', KEYS[2], ticket) == 0 and not redis.call('ZSCORE', KEYS[3], ticket) then
      tickets[#tickets + 1] = ticket
    end
  end
  return tickets
end
