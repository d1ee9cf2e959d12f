-- Removes everything a location has announced, unless another epoch holds the lease.
-- KEYS: members, meta, blocks, stage, changes
-- ARGV: location, epoch, header for the readers, stream length
if redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[2] then
  return 0
end
redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4])
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[4], '*', 'l', ARGV[1], 'h', ARGV[3], 'a', '', 'r', '')
return 1
