-- Applies one announcement of a location: a change of its set, or a part of its whole set, which is staged and takes
-- effect when complete. Also renews the lease: repeating the last announcement changes nothing else.
-- KEYS: incarnation, members, meta, blocks, stage, changes
-- ARGV: location, epoch, sequence number, flags, adds (id and tier, 17 bytes each), removes (16 bytes each),
--       count and xor of the set once this is applied, header for the readers, lease ms, stream length,
--       incarnation to use if there is none
-- Returns {status, incarnation}; status 1 (applied), 2 (was applied before), 0 (announce everything), -1 (a later epoch holds the lease).
local STAGED, BEGIN, COMMIT = 1, 2, 4
local epoch, seq, flags = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local meta, blocks, stage = KEYS[3], KEYS[4], KEYS[5]

local function has(flag)
  return bit.band(flags, flag) ~= 0
end

local function renew()
  redis.call('PEXPIRE', meta, ARGV[10])
  redis.call('PEXPIRE', blocks, ARGV[10])
  redis.call('PEXPIRE', stage, ARGV[10])
end

local function write(key)
  local adds, removes = ARGV[5], ARGV[6]
  local pairs_ = {}
  for at = 1, #adds, 17 do
    pairs_[#pairs_ + 1] = string.sub(adds, at, at + 15)
    pairs_[#pairs_ + 1] = string.sub(adds, at + 16, at + 16)
  end
  if #pairs_ > 0 then
    redis.call('HSET', key, unpack(pairs_))
  end
  local ids = {}
  for at = 1, #removes, 16 do
    ids[#ids + 1] = string.sub(removes, at, at + 15)
  end
  if #ids > 0 then
    redis.call('HDEL', key, unpack(ids))
  end
end

redis.call('SET', KEYS[1], ARGV[12], 'NX')
local incarnation = redis.call('GET', KEYS[1])
local held = redis.call('HMGET', meta, 'epoch', 'seq')
local held_epoch, held_seq = tonumber(held[1] or 0), tonumber(held[2] or 0)
if held_epoch > epoch then
  return {-1, incarnation}
end
if held_epoch == epoch and held_seq == seq then
  renew()
  return {2, incarnation}
end
if not has(BEGIN) and (held_epoch ~= epoch or held_seq ~= seq - 1) then
  return {0, incarnation}
end
if has(BEGIN) then
  redis.call('UNLINK', stage)
  if held_epoch ~= epoch then
    redis.call('UNLINK', blocks)
    redis.call('HSET', meta, 'epoch', ARGV[2], 'count', 0, 'xor', string.rep('\0', 16))
  end
  redis.call('SADD', KEYS[2], ARGV[1])
end
write(has(STAGED) and stage or blocks)
if has(COMMIT) then
  if redis.call('EXISTS', stage) == 1 then
    redis.call('RENAME', stage, blocks)
  else
    redis.call('UNLINK', blocks)
  end
end
redis.call('HSET', meta, 'seq', ARGV[3])
if has(COMMIT) or not has(STAGED) then
  redis.call('HSET', meta, 'count', ARGV[7], 'xor', ARGV[8])
end
renew()
redis.call('XADD', KEYS[6], 'MAXLEN', '~', ARGV[11], '*', 'l', ARGV[1], 'h', ARGV[9], 'a', ARGV[5], 'r', ARGV[6])
return {1, incarnation}
