-- What operators have set, unless the reader has it already.
-- KEYS: incarnation, table, revision, changes
-- ARGV: incarnation and revision that the reader knows, incarnation to use if there is none
-- Returns {incarnation, revision, last id of the change stream, microseconds now,
--          {key, "version payload", ...} or false if the reader has all}.
redis.call('SET', KEYS[1], ARGV[3], 'NX')
local incarnation = redis.call('GET', KEYS[1])
local revision = redis.call('GET', KEYS[3]) or '0'
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)
local now = redis.call('TIME')
local known = ARGV[1] == incarnation and ARGV[2] == revision
return {
  incarnation, revision, last[1] and last[1][1] or '0-0', now[1] .. string.format('%06d', now[2]),
  not known and redis.call('HGETALL', KEYS[2]),
}
