-- Register or renew a lease, and return the group's state. Restores what a restarted Redis may have lost.
--
--   KEYS: as listed in _group.lua
--   ARGV[1] member id, ARGV[2] its fence (0 before it has one), ARGV[3] lease in ms, ARGV[4] a JSON object:
--     quiet_ms     for how many ms no generation is proposed after Redis has lost data
--     member       JSON of the member, and its status
--     run          the id of its run
--     known        the state it saw last: clock in ms, highest (number of any generation); JSON of the generation, '' for
--                  none; stop and outcome, if any; finished and left, ids
--
-- Answers {'registered', fence, now in ms, JSON of [state, leases, records, beats]}, these four as flat lists, in one text
-- because clients take long to read hundreds; {'superseded'}: a later agent has the index; {'taken', ms}: another run has the
-- job, and a lease of its members lasts so long.

-- How many numbers of generations are skipped when an older copy of Redis's data is used. There is less than one a second, and
-- Redis's replicas are some seconds late at most.
local SKIPPED = 100

-- How often it is looked how late the members are, in ms: of hundreds, that takes most of the time of a call.
local LOOK_EVERY = 50

-- The longest recent gap between a member's heartbeats, in ms. Decays by a quarter of the time that passes, so that one
-- slow moment does not lengthen leases for good.
local function lateness(before, elapsed)
  return math.max(elapsed, math.floor((before.late or 0) - elapsed / 4))
end

-- The median of these gaps among members with a heartbeat in the last `window` ms; 0 without any. Dead members don't
-- count.
local function usual_lateness(now, window)
  local found = {}
  for _, id in ipairs(redis.call('HKEYS', KEYS[3])) do
    local beat = beat_of(id)
    if beat and beat.late and now - beat.at <= window then
      found[#found + 1] = beat.late
    end
  end
  table.sort(found)
  return found[math.floor((#found + 1) / 2)] or 0
end

-- By how many ms leases are extended beyond `ttl`, given the usual gap. Up to a sixth of a lease (or 500 ms): 0. Above, a
-- lease lasts six such gaps, at most ten times `ttl`.
local function overtime_of(late, ttl)
  local share = late / math.max(ttl / 6, 500)
  return math.floor(ttl * (math.min(math.max(share, 1), 10) - 1))
end

local id, ttl, given = ARGV[1], tonumber(ARGV[3]), cjson.decode(ARGV[4])
local quiet, status, known = given.quiet_ms, given.status, given.known
local member = cjson.decode(given.member)
local generation = known.generation ~= '' and cjson.decode(known.generation) or {number = 0}
local is_behind = known.clock > number('clock')
local now, wall = tick(ttl, known.clock)

-- An earlier run that has ended, or has no members left, is replaced by this one; generation numbers are not reused.
local run = get('run')
if run ~= given.run or (run == '' and ARGV[2] == '0' and get('outcome')) then
  purge(now)
  local alive = redis.call('EXISTS', KEYS[1]) == 1
  if run and run ~= given.run and alive and not get('outcome') then
    return {'taken', number('ttl') + number('overtime')}
  end
  if run ~= given.run or not alive then
    redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
    unset('generation', 'current', 'members', 'formed', 'since', 'proposed_at', 'resumed', 'finished', 'left',
      'suspected_at', 'suspected_by', 'suspected_for', 'stop', 'outcome', 'waits', 'saved', 'saved_at', 'size', 'resized',
      'checkpoint_asked', 'checkpoint_asked_in', 'checkpoint_answered', 'checkpoint_answer', 'slow', 'overtime',
      'overtime_at', 'late_announced', 'failures')
  end
  set('run', given.run)
end

-- Redis has restarted and may have lost data: drop all members, who register again as in an empty Redis. The newest state
-- that any of them has seen counts, whichever comes first.
local known_history = get('history')
local is_new = known_history ~= history()
if is_new then
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
  unset('suspected_at', 'suspected_by', 'suspected_for')
  set('history', history())
end
if is_new or is_behind then
  set('quiet_until', now + quiet)
end
if known.highest > number('number') or not get('number') then
  set('number', known.highest)
end
-- Agents that come back late, and checkpoints, may have numbers that Redis has lost with its last writes: skip them.
if is_new and known_history then
  set('number', number('number') + SKIPPED)
end
local is_newer = generation.number > number('current')
if is_newer then
  set('generation', known.generation, 'current', generation.number, 'members', table.concat(generation.members, ' '),
    'formed', 'forming', 'since', now, 'proposed_at', now, 'resumed', 1, 'quiet_until', now + quiet)
  unset('left', 'suspected_at', 'suspected_by', 'suspected_for')
end
if now < number('quiet_until') then
  if known.stop then
    redis.call('HSETNX', KEYS[4], 'stop', known.stop)
  end
  if known.outcome then
    redis.call('HSETNX', KEYS[4], 'outcome', known.outcome)
  end
  for each in string.gmatch(known.finished, '%S+') do
    add('finished', each)
  end
  if generation.number == number('current') then
    for each in string.gmatch(known.left, '%S+') do
      add('left', each)
    end
  end
end
if is_new or is_behind or is_newer then
  for _, each in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    redis.call('ZADD', KEYS[1], now + ttl, each)
  end
  for each in string.gmatch(get('members') or '', '%S+') do
    if not has('left', each) then
      redis.call('ZADD', KEYS[1], 'NX', now + ttl, each)
    end
  end
end
if is_newer or (is_new and get('members')) then
  announce('restored', {generation = number('current'), members = indexes(get('members'))})
end
if member.seen > number('number') then
  set('number', member.seen)
end

-- Of two agents of one instance the later one counts. An agent keeps its fence for its lifetime.
local before = beat_of(id)
local fence = tonumber(ARGV[2])
if fence == 0 and before then
  fence = before.fence -- it had registered but did not get the answer
end
for _, other in ipairs(before and {} or redis.call('HKEYS', KEYS[3])) do
  if other ~= id and index_of(other) == member.index then
    local of = beat_of(other)
    if fence ~= 0 and of and of.fence >= fence then
      return {'superseded'}
    end
    drop(other, 'superseded')
  end
end
if fence == 0 then
  fence = redis.call('HINCRBY', KEYS[4], 'fence', 1)
  if fence == 1 then -- start from the clock, above every token that Redis may have lost
    fence = wall
  end
end
if fence > number('fence') then
  set('fence', fence)
end

local beat = {fence = fence, at = now, since = before and before.since or now, status = status,
  lost = member.lost, up = member.up, stepped = member.stepped, paused_in = member.paused_in,
  pause = type(member.pause_s) == 'number' and math.floor(member.pause_s * 1000 + 0.5) or nil,
  late = before and lateness(before, now - before.at)}
local has_failed = before and beat.lost > before.lost
if has_failed or (before and before.status ~= status) then
  beat.since = now
end

-- The stragglers of the current generation, each with how many times as long as its peers it computes.
if (member.slow or 0) > 0 or get('slow') then
  local slow = {}
  for each, times in string.gmatch(get('slow') or '', '(%S+)=(%S+)') do
    if each ~= id and has('members', each) then
      slow[#slow + 1] = each .. '=' .. times
    end
  end
  if (member.slow or 0) > 0 then
    slow[#slow + 1] = string.format('%s=%.2f', id, member.slow)
  end
  if #slow > 0 then
    set('slow', table.concat(slow, ' '))
  else
    unset('slow')
  end
end
set('ttl', ARGV[3])
redis.call('ZADD', KEYS[1], now + ttl, id)
redis.call('HSET', KEYS[2], id, given.member)
redis.call('HSET', KEYS[3], id, cjson.encode(beat))
if status == 'finished' then
  add('finished', id)
end
if not before then
  announce_of('registered', id)
elseif has_failed then
  announce_of('lost', id)
end
if status ~= (before and before.status or 'loading') then
  announce_of(status, id)
end
local overtime, usual = number('overtime'), nil
if now >= number('overtime_at') + LOOK_EVERY then
  usual = usual_lateness(now, ttl / 2)
  overtime = overtime_of(usual, ttl)
  set('overtime', overtime, 'overtime_at', now)
end
purge(now)
if usual and redis.call('ZCOUNT', KEYS[1], '-inf', now) > 0 and not get('late_announced') then
  set('late_announced', 1)
  announce('late', {generation = number('current'), reason = string.format(
    'most instances renew their leases late, %.1f s apart: leases last %.1f s instead of %.1f s',
    usual / 1000, (ttl + overtime) / 1000, ttl / 1000)})
end

-- Whether all members that have not finished have reached that point of the generation.
local function all(reached)
  local any = false
  for each in string.gmatch(get('members') or '', '%S+') do
    any = true
    local of = beat_of(each)
    if not has('finished', each) and not (of and reached(of)) then
      return false
    end
  end
  return any
end

if get('formed') == 'forming' and member.advanced and has('members', id) then
  set('since', now) -- it is not overdue while its members make progress
end

local current = number('current')
local total_s = (now - number('proposed_at')) / 1000
if get('formed') == 'forming' and all(function(of) return of.up >= current end) then
  set('formed', 'active', 'since', now)
  announce('active', {generation = current, members = indexes(get('members')), total_s = total_s})
end

-- A member may finish without a step in this generation: its script reports none, or all was trained before. Of the
-- pauses only those in the latest generation count: members that were away did not pause with the others.
if get('formed') == 'active' and not get('resumed') and all(function(of) return of.stepped >= current end) then
  local stepped, paused_in, pause = false, 0, nil
  for each in string.gmatch(get('members'), '%S+') do
    local of = beat_of(each)
    if of and of.stepped >= current then
      stepped = true
      if of.pause and of.paused_in >= paused_in then
        pause = math.max(of.pause, of.paused_in == paused_in and pause or 0)
        paused_in = of.paused_in
      end
    end
  end
  if stepped then
    set('resumed', 1)
    local members = indexes(get('members'))
    announce('resumed', {generation = current, members = members, total_s = total_s, pause_s = pause and pause / 1000})
    if get('size') then
      local is_json, made = pcall(cjson.decode, get('generation'))
      set('resized', cjson.encode({before = number('size'), after = #members, at = wall / 1000, total_s = total_s,
        pause_s = pause and pause / 1000, gear = is_json and made.gear or nil, reason = is_json and made.reason or nil}))
    end
    set('size', #members)
  end
end
keep()

local group = {redis.call('HGETALL', KEYS[4]), redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'),
  redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[3])}
return {'registered', fence, now, cjson.encode(group)}
