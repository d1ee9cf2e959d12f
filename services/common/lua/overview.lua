-- State of every location of a shard; forgets members whose lease has ended.
-- KEYS: incarnation, members, changes
-- ARGV: prefix of the meta keys, incarnation to use if there is none
-- Returns {incarnation, last id of the change stream, {{location, epoch, sequence number, count, xor}, ...}}.
redis.call('SET', KEYS[1], ARGV[2], 'NX')
local found = {}
for _, location in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  local meta = redis.call('HMGET', ARGV[1] .. location, 'epoch', 'seq', 'count', 'xor')
  if meta[2] then
    found[#found + 1] = {location, meta[1], meta[2], meta[3], meta[4]}
  else
    redis.call('SREM', KEYS[2], location)
  end
end
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
return {redis.call('GET', KEYS[1]), last[1] and last[1][1] or '0-0', found}
