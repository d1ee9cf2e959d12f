-- Every record with a living lease; forgets members whose lease has ended.
-- KEYS: incarnation, members, changes
-- ARGV: prefix of the record keys, incarnation to use if there is none
-- Returns {incarnation, last id of the change stream, {record bytes, ...}}.
redis.call('SET', KEYS[1], ARGV[2], 'NX')
local records = {}
for _, location in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  local record = redis.call('HGET', ARGV[1] .. location, 'record')
  if record then
    records[#records + 1] = record
  else
    redis.call('SREM', KEYS[2], location)
  end
end
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
return {redis.call('GET', KEYS[1]), last[1] and last[1][1] or '0-0', records}
