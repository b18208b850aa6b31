-- Prepended to the scripts of the ledger and of the trainer group.

-- The id of this Redis's data set. It changes when Redis restarts or a replica takes over: the last writes may be lost.
local function history()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
end

