-- Mark a stream as complete.
--
--   KEYS: as listed in _ledger.lua
--
-- Answers {'ok'}.

read_state()
redis.call('HSET', KEYS[1], 'closed', 1)
redis.call('HSETNX', KEYS[1], 'added', 0)
keep()
return {'ok'}
