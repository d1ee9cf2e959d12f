-- Takes a follower off the list, unless another epoch is there.
-- KEYS: followers
-- ARGV: follower, epoch
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and string.match(held, '^%d+') == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return 1
