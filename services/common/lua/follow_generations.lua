-- Notes how far a follower has come, and gives it the table if there is more.
-- KEYS: incarnation, table, revision, changes, followers
-- ARGV: follower, epoch, incarnation that it knows, revision that it has carried out
-- Returns {incarnation, revision, last id of the change stream, {tag, generation, ...} or false if it knows all},
-- or false when a later epoch of the follower is there.
local held = redis.call('HGET', KEYS[5], ARGV[1])
if held and tonumber(string.match(held, '^%d+')) > tonumber(ARGV[2]) then
  return false
end
local now = redis.call('TIME')
redis.call('SET', KEYS[1], now[1] .. string.format('%06d', now[2]), 'NX')
local incarnation = redis.call('GET', KEYS[1])
local revision = redis.call('GET', KEYS[3]) or '0'
local known = ARGV[3] == incarnation and ARGV[4] or '-1'
redis.call('HSET', KEYS[5], ARGV[1], ARGV[2] .. ' ' .. known .. ' ' .. now[1])
local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)
local position = last[1] and last[1][1] or '0-0'
return {incarnation, revision, position, known ~= revision and redis.call('HGETALL', KEYS[2])}
