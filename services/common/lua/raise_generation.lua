-- Begins a new generation of one tenant: now, or more where that would not be newer.
-- KEYS: table, revision, changes
-- ARGV: tag, most tenants of the table
-- Returns {generation, revision}, or false when the table is full.
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[2]) then
  return false
end
local now = redis.call('TIME')
local generation = math.max(now[1] * 1000000 + now[2], tonumber(held or '0') + 1)
generation = string.format('%.0f', generation)
redis.call('HSET', KEYS[1], ARGV[1], generation)
local revision = redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'r', revision)
return {generation, revision}
