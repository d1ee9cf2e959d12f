-- Writes what has become of a run of a request with an idempotency key, unless another run has taken its place.
-- KEYS: record
-- ARGV: run, lease ms, life ms (0: forget it), field, value, ...
-- Returns 1, or 0 when another run holds the record, or none.
if redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then
  return 0
end
if ARGV[3] == '0' then
  redis.call('DEL', KEYS[1])
  return 1
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'lease', string.format('%.0f', now + ARGV[2]))
for at = 4, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
