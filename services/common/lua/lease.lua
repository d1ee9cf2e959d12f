-- Takes, renews or gives back a lease that one holder has at a time.
-- KEYS: lease
-- ARGV: holder, lease in ms (0: give it back)
-- Returns 1 when the caller has it now (or has given it back), 0 when another has it.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return 0
end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
