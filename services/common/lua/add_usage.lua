-- Adds a gateway's batch of usage to the sums of its days, once: a batch that was added already changes nothing.
-- KEYS: the number of the gateway's last batch, then the hash of each day
-- ARGV: number of the batch, 1 when it holds all that the gateway has ever counted, seconds to keep,
--       then for each figure the index of its day among KEYS, its field and its amount
-- Returns 1, or 0 when this Redis knows nothing of the gateway's earlier batches, and nothing was added
local known, number = tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1])
if known >= number then return 1 end
if known == 0 and ARGV[2] ~= '1' then return 0 end
for at = 4, #ARGV, 3 do
  redis.call('HINCRBY', KEYS[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2])
end
for at = 2, #KEYS do redis.call('EXPIRE', KEYS[at], ARGV[3]) end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
return 1
