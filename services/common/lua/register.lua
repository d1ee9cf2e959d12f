-- Writes or renews the leased record of one location.
-- KEYS: incarnation, members, changes, record
-- ARGV: location, epoch, record bytes, lease ms, incarnation to use if there is none
-- Returns 1 (new or changed), 0 (renewed), -1 (a later epoch holds the lease).
local held = redis.call('HMGET', KEYS[4], 'epoch', 'record')
if held[1] and tonumber(held[1]) > tonumber(ARGV[2]) then
  return -1
end
redis.call('SET', KEYS[1], ARGV[5], 'NX')
local changed = held[2] ~= ARGV[3]
if changed then
  redis.call('HSET', KEYS[4], 'epoch', ARGV[2], 'record', ARGV[3])
end
redis.call('PEXPIRE', KEYS[4], ARGV[4])
if redis.call('SADD', KEYS[2], ARGV[1]) == 1 or changed then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'l', ARGV[1])
  return 1
end
return 0
