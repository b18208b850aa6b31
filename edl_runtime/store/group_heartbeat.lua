-- Register, or renew a lease, and return the group. Brings back what a Redis may have lost that was started anew.
--
--   KEYS[1] leases   sorted set, member id -> deadline in ms
--   KEYS[2] records  hash, member id -> JSON of the member
--   KEYS[3] beats    hash, member id -> its fence, times and state
--   KEYS[4] state    hash, the generation and all that is said of it
--   KEYS[5] events   stream of {event = JSON}
--   ARGV[1] member id, ARGV[2] its fence (0 before it has one), ARGV[3] lease in ms, ARGV[4] a JSON object:
--     quiet_ms     for how many ms nothing is to be decided in a Redis that has forgotten something
--     member       JSON of the member, and of it: index, status, lost, up, stepped, seen, paused_in;
--     pause_ms     missing where it has not trained before
--     advanced     whether its trainer has come on towards the generation that forms
--     run          the word of its run
--     known        what it saw last: clock in ms, highest (number of any generation); generation (JSON), number and
--                  members of the generation, if there was one; stop and outcome, if any; finished and left, ids
--
-- Answers {'beaten', fence, now in ms, id of the newest event, state, leases, records, beats}, the last four as flat
-- lists; {'superseded'}: a later agent has the index; {'taken'}: another run has the job.

-- The longest that a member was silent of late, in ms, `elapsed` after its last beat: forgotten by a quarter of the time
-- that it beats in.
local function lateness(before, elapsed)
  return math.max(elapsed, math.floor((before.late or 0) - elapsed / 4))
end

-- What is usual of that among those who beat in the last `window` ms: 0 where nobody did twice. Who is dead is not late,
-- and has no say.
local function usual_lateness(now, window)
  local found = {}
  for _, beat in ipairs(redis.call('HVALS', KEYS[3])) do
    local beaten, late = string.match(beat, '^%d+ (%d+) .* (%d+)$')
    if beaten and now - beaten <= window then
      found[#found + 1] = tonumber(late)
    end
  end
  table.sort(found)
  return found[math.floor((#found + 1) / 2)] or 0
end

-- What leases last beyond `ttl` ms, in ms, where members are usually `late` ms between two beats: nothing up to a sixth
-- of a lease, twice what is between two beats at least. Above, a lease is six of those silences, ten leases at most.
local function overtime_of(late, ttl)
  local share = late / math.max(ttl / 6, 500)
  return math.floor(ttl * (math.min(math.max(share, 1), 10) - 1))
end

local id, ttl, given = ARGV[1], tonumber(ARGV[3]), cjson.decode(ARGV[4])
local quiet, standing, known = given.quiet_ms, given.status, given.known
local is_behind = known.clock > number('clock')
local now, wall = tick(ttl, known.clock)

-- An earlier run that has ended, or whose members are all gone, makes place for this one; its numbers are not reused.
local run = get('run')
if run ~= given.run then
  unset('overtime', 'late_told') -- whoever is of that run may be dead
end
if run ~= given.run or (run == '' and ARGV[2] == '0' and get('outcome')) then
  purge(now)
  local alive = redis.call('EXISTS', KEYS[1]) == 1
  if run and run ~= given.run and alive and not get('outcome') then
    return {'taken'}
  end
  if run ~= given.run or not alive then
    redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
    unset('generation', 'current', 'members', 'formed', 'since', 'proposed_at', 'resumed', 'finished', 'left',
      'suspected_at', 'suspected_by', 'suspected_for', 'stop', 'outcome', 'waits', 'saved')
  end
  set('run', given.run)
end

-- What Redis may have forgotten: in one that was started anew all come back, as to an empty one, for others may be there
-- than it knows. All that any of them has seen counts, whoever is the first.
local is_new = get('history') ~= history()
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
local is_newer = known.number > number('current')
if is_newer then
  set('generation', known.generation, 'current', known.number, 'members', known.members, 'formed', 'forming', 'since', now,
    'proposed_at', now, 'resumed', 1, 'quiet_until', now + quiet)
  unset('left', 'suspected_at', 'suspected_by', 'suspected_for')
end
if now < number('quiet_until') then
  if known.stop then
    redis.call('HSETNX', KEYS[4], 'stop', known.stop)
  end
  if known.outcome then
    redis.call('HSETNX', KEYS[4], 'outcome', known.outcome)
  end
  for member in string.gmatch(known.finished, '%S+') do
    add('finished', member)
  end
  if known.number == number('current') then
    for member in string.gmatch(known.left, '%S+') do
      add('left', member)
    end
  end
end
if is_new or is_behind or is_newer then
  for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    redis.call('ZADD', KEYS[1], now + ttl, member)
  end
  for member in string.gmatch(get('members') or '', '%S+') do
    if not has('left', member) then
      redis.call('ZADD', KEYS[1], 'NX', now + ttl, member)
    end
  end
end
if is_newer or (is_new and get('members')) then
  announce('restored', {generation = number('current'), members = indexes(get('members'))})
end
if given.seen > number('number') then
  set('number', given.seen)
end

-- Of two agents of one instance the later one counts. An agent keeps its fence for as long as it lives.
local before = beat_of(id)
local fence = tonumber(ARGV[2])
if fence == 0 and before then
  fence = before.fence -- it was registered, and did not hear of it
end
for _, other in ipairs(before and {} or redis.call('HKEYS', KEYS[3])) do
  if other ~= id and index_of(other) == given.index then
    local of = beat_of(other)
    if fence ~= 0 and of and of.fence >= fence then
      return {'superseded'}
    end
    drop(other, 'superseded')
  end
end
if fence == 0 then
  fence = redis.call('HINCRBY', KEYS[4], 'fence', 1)
  if fence == 1 then -- start at the clock, above every token that Redis may have forgotten
    fence = wall
  end
end
if fence > number('fence') then
  set('fence', fence)
end

local beat = {fence = fence, beaten = now, since = before and before.since or now, standing = standing,
  lost = given.lost, up = given.up, stepped = given.stepped, pause = given.pause_ms, paused_in = given.paused_in,
  late = before and lateness(before, now - before.beaten)}
local fell = before and beat.lost > before.lost
if fell or (before and before.standing ~= standing) then
  beat.since = now
end
set('ttl', ARGV[3])
redis.call('ZADD', KEYS[1], now + ttl, id)
redis.call('HSET', KEYS[2], id, given.member)
put_beat(id, beat)
if standing == 'finished' then
  add('finished', id)
end
if not before then
  announce_of('registered', id)
elseif fell then
  announce_of('lost', id)
end
if standing ~= (before and before.standing or 'loading') then
  announce_of(standing, id)
end
local usual = usual_lateness(now, ttl / 2)
local overtime = overtime_of(usual, ttl)
set('overtime', overtime)
purge(now)
if redis.call('ZCOUNT', KEYS[1], '-inf', now) > 0 and not get('late_told') then
  set('late_told', 1)
  announce('late', {generation = number('current'), reason = string.format(
    'most instances renew their leases late, %.1f s apart: leases last %.1f s instead of %.1f s',
    usual / 1000, (ttl + overtime) / 1000, ttl / 1000)})
end

-- How far the generation has come.
local function all(reached)
  local any = false
  for member in string.gmatch(get('members') or '', '%S+') do
    any = true
    local of = beat_of(member)
    if not has('finished', member) and not (of and reached(of)) then
      return false
    end
  end
  return any
end

if get('formed') == 'forming' and given.advanced and has('members', id) then
  set('since', now) -- while its members come on it is not overdue
end

local current = number('current')
local total_s = (now - number('proposed_at')) / 1000
if get('formed') == 'forming' and all(function(of) return of.up >= current end) then
  set('formed', 'active', 'since', now)
  announce('active', {generation = current, members = indexes(get('members')), total_s = total_s})
end

-- Who has finished has done so without a step in it where its script tells of none, or all was trained before. Who was
-- away while others trained has not paused with them.
if get('formed') == 'active' and not get('resumed') and all(function(of) return of.stepped >= current end) then
  local stepped, paused_in, pause = false, 0, nil
  for member in string.gmatch(get('members'), '%S+') do
    local of = beat_of(member)
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
    announce('resumed', {generation = current, members = indexes(get('members')), total_s = total_s,
      pause_s = pause and pause / 1000})
  end
end
keep()

local newest = redis.call('XREVRANGE', KEYS[5], '+', '-', 'COUNT', 1)[1] or {'0-0'}
return {'beaten', fence, now, newest[1], redis.call('HGETALL', KEYS[4]),
  redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'), redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[3])}
