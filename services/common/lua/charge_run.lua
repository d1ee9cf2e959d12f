-- Raises what was charged of one run to what has been told of it, and says by how much. Asked again with the same name
-- for the question, it gives the same answer.
-- KEYS: the run's hash
-- ARGV: seconds to keep it, name of the question, then pairs of figure and amount
-- Returns the differences, in the order of the figures
if redis.call('HGET', KEYS[1], 'asked') == ARGV[2] then
  return cjson.decode(redis.call('HGET', KEYS[1], 'added'))
end
local added = {}
for at = 3, #ARGV, 2 do
  local before, now = tonumber(redis.call('HGET', KEYS[1], ARGV[at]) or '0'), tonumber(ARGV[at + 1])
  if now > before then redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1]) end
  added[#added + 1] = string.format('%.0f', math.max(0, now - before))
end
redis.call('HSET', KEYS[1], 'asked', ARGV[2], 'added', cjson.encode(added))
redis.call('EXPIRE', KEYS[1], ARGV[1])
return added
