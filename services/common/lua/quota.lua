-- Counts what one tenant uses, for all gateways: settles what has ended, renews what runs, and charges a new request
-- when no quota is used up.
-- Requests and tokens are token buckets that hold one minute's quota and refill steadily, and nothing is kept of one
-- without a quota, so that a quota given later begins full; requests in flight are leases.
-- KEYS: buckets (hash), leases (sorted set: lease -> expiry), gateways (the same)
-- ARGV: requests per minute, tokens per minute, requests in flight (0: no quota), lease ms, tokens given back,
--       gateway, tokens charged, lease taken ('' charges nothing), number of ended leases, ended leases..., renewed ones...
-- Returns {quota that is used up or '', ms until it would not be, requests left, tokens left, gateways}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local per_minute = { requests = tonumber(ARGV[1]), tokens = tonumber(ARGV[2]) }
local most, lease_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
local lease, num_ended = ARGV[8], tonumber(ARGV[9])

local stored = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local passed = math.max(0, now - (tonumber(stored[3]) or now)) / 60000
local left = {}
for at, name in ipairs({ 'requests', 'tokens' }) do
  local quota = per_minute[name]
  local given_back = name == 'tokens' and tonumber(ARGV[5]) or 0
  left[name] = math.min(quota, (tonumber(stored[at]) or quota) + passed * quota + given_back)
end
for at = 10, #ARGV do
  if at < 10 + num_ended then
    redis.call('ZREM', KEYS[2], ARGV[at])
  else
    redis.call('ZADD', KEYS[2], now + lease_ms, ARGV[at])
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)

local refused, wait_ms = '', 0
if lease ~= '' then
  for name, needed in pairs({ requests = 1, tokens = tonumber(ARGV[7]) }) do
    local quota = per_minute[name]
    local missing = math.min(needed, quota) - left[name]
    if quota > 0 and missing > 1e-6 and missing / quota * 60000 > wait_ms then
      refused, wait_ms = name, missing / quota * 60000
    end
  end
  if refused == '' and most > 0 and redis.call('ZCARD', KEYS[2]) >= most then
    refused, wait_ms = 'concurrent', 1000
  end
  if refused == '' then
    left.requests, left.tokens = left.requests - 1, left.tokens - tonumber(ARGV[7])
    redis.call('ZADD', KEYS[2], now + lease_ms, lease)
  end
end

local until_full_ms = 60000
for name, quota in pairs(per_minute) do
  if quota > 0 then until_full_ms = math.max(until_full_ms, (quota - left[name]) / quota * 60000) end
end
for name, quota in pairs(per_minute) do
  redis.call('HSET', KEYS[1], name, quota > 0 and tostring(left[name]) or '')
end
redis.call('HSET', KEYS[1], 'at', now)
redis.call('PEXPIRE', KEYS[1], math.ceil(until_full_ms))
redis.call('PEXPIRE', KEYS[2], lease_ms)
redis.call('ZADD', KEYS[3], now + 60000, ARGV[6])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
redis.call('PEXPIRE', KEYS[3], 60000)
return { refused, math.ceil(wait_ms), tostring(left.requests), tostring(left.tokens), redis.call('ZCARD', KEYS[3]) }
