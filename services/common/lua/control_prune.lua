-- Takes out entries that are over, where nobody has changed them.
-- KEYS: table, revision, changes
-- ARGV: key, version, and so on
local changed = false
for at = 1, #ARGV, 2 do
  local held = redis.call('HGET', KEYS[1], ARGV[at])
  if held and string.match(held, '^%d+') == ARGV[at + 1] then
    redis.call('HDEL', KEYS[1], ARGV[at])
    changed = true
  end
end
if changed then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'r', redis.call('INCR', KEYS[2]))
end
return changed
