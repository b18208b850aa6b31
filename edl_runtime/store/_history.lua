-- Stands before what the scripts of a ledger and of a trainer group share.

-- Which history the data here are of: another whenever Redis has been started anew, or a replica has taken its place.
-- What happened last may be missing then.
local function history()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
end

