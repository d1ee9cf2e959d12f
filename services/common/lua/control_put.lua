-- Writes one entry of what operators have set, if it still is as its writer knew it.
-- KEYS: table, revision, changes
-- ARGV: key, version that the writer knew (0: none), payload, most entries
-- Returns the new version, or 0 when another version is there, -1 when the table is full.
local held = redis.call('HGET', KEYS[1], ARGV[1])
local version = held and string.match(held, '^%d+') or '0'
if version ~= ARGV[2] then
  return '0'
end
if not held and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then
  return '-1'
end
local now = redis.call('TIME')
version = string.format('%.0f', math.max(now[1] * 1000000 + now[2], tonumber(version) + 1))
redis.call('HSET', KEYS[1], ARGV[1], version .. ' ' .. ARGV[3])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'r', redis.call('INCR', KEYS[2]))
return version
