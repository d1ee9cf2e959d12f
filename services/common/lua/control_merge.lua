-- Puts back entries of what operators have set that Redis lacks or has older.
-- KEYS: table, revision, changes
-- ARGV: key, "version payload", and so on
local changed = false
for at = 1, #ARGV, 2 do
  local held = redis.call('HGET', KEYS[1], ARGV[at])
  if not held or tonumber(string.match(held, '^%d+')) < tonumber(string.match(ARGV[at + 1], '^%d+')) then
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
    changed = true
  end
end
if changed then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'r', redis.call('INCR', KEYS[2]))
end
return changed
