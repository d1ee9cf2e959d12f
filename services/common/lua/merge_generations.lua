-- Puts back generations that Redis lacks or has older.
-- KEYS: table, revision, changes
-- ARGV: tag, generation, and so on
local raised = false
for at = 1, #ARGV, 2 do
  local held = redis.call('HGET', KEYS[1], ARGV[at])
  if not held or tonumber(held) < tonumber(ARGV[at + 1]) then
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
    raised = true
  end
end
if raised then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'r', redis.call('INCR', KEYS[2]))
end
return raised
