-- Makes a request with an idempotency key its caller's to run, or says who runs or has run it.
-- A run that no worker has taken is given up when its lease ends.
-- KEYS: record
-- ARGV: digest of the body, run and revision that the caller could not attach to ('' for none), lease ms, life ms
-- Returns {'run', run, first claimed at (s)}, {'held', run, first claimed at (s), {field, value, ...} of its places},
--         or {'other'} when the key belongs to another body.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = {}
local fields = redis.call('HGETALL', KEYS[1])
for at = 1, #fields, 2 do
  held[fields[at]] = fields[at + 1]
end
if held.body and held.body ~= ARGV[1] then
  return {'other'}
end
local lapsed = not held.taken and tonumber(held.lease or '0') < now
local failed = held.run == ARGV[2] and (held.revision or '') == ARGV[3]
if held.body and not failed and not lapsed then
  local places = {}
  for field, value in pairs(held) do
    places[#places + 1] = field
    places[#places + 1] = value
  end
  return {'held', held.run, held.at, places}
end
local run = string.format('%.0f', math.max(time[1] * 1000000 + time[2], tonumber(held.run or '0') + 1))
local at = held.at or time[1]
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'body', ARGV[1], 'run', run, 'at', at, 'lease', string.format('%.0f', now + ARGV[4]))
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {'run', run, at}
