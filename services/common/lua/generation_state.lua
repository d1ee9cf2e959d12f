-- The generation of one tenant and how far each follower has come; forgets followers that have been silent for long.
-- KEYS: incarnation, table, revision, changes, followers
-- ARGV: tag, seconds of silence after which a follower is forgotten
-- Returns {incarnation, microseconds now, generation, revision, {follower, carried out revision, seconds silent, ...}}.
local now = redis.call('TIME')
redis.call('SET', KEYS[1], now[1] .. string.format('%06d', now[2]), 'NX')
local found = {}
local followers = redis.call('HGETALL', KEYS[5])
for at = 1, #followers, 2 do
  local _, known, seen = string.match(followers[at + 1], '^(%d+) (-?%d+) (%d+)$')
  local silent = now[1] - seen
  if silent > tonumber(ARGV[2]) then
    redis.call('HDEL', KEYS[5], followers[at])
  else
    for _, value in ipairs({followers[at], known, tostring(silent)}) do
      found[#found + 1] = value
    end
  end
end
local generation, revision = redis.call('HGET', KEYS[2], ARGV[1]) or '0', redis.call('GET', KEYS[3]) or '0'
return {redis.call('GET', KEYS[1]), now[1] .. string.format('%06d', now[2]), generation, revision, found}
