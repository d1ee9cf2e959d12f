-- Removes the record of one location, unless another epoch holds it.
-- KEYS: members, changes, record
-- ARGV: location, epoch
if redis.call('HGET', KEYS[3], 'epoch') ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[3])
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'l', ARGV[1])
return 1
