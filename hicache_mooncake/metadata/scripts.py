"""The changes that must be atomic, as Lua. Each is idempotent: running it twice leaves what running it once
does.

All of them work on Redis 6.2 and Valkey. None scans, and none takes more keys than a caller bounds, so none
holds the server for longer than a few milliseconds.
"""

from __future__ import annotations

import hashlib


class Script:
    """A Lua script and the digest under which Redis remembers it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha1 = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


OPEN = Script(
    """
-- KEYS: pool. ARGV: schema, shards and time of creation, used when the pool is new.
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'shards', ARGV[2], 'created', ARGV[3])
end
return redis.call('HMGET', KEYS[1], 'schema', 'shards')
"""
)

HEARTBEAT = Script(
    """
-- KEYS: shard, nodes, node. ARGV: epoch and time of creation, used when the shard is new or was lost, then node id,
-- TTL in ms, lease, then fields and values of the node. Returns the shard's epoch and the node's lease.
-- The lease stays as long as the node's key does: another one tells the node that it was dead for the others.
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  epoch = ARGV[1]
  redis.call('HSET', KEYS[1], 'epoch', epoch, 'created', ARGV[2])
end
local lease = redis.call('HGET', KEYS[3], 'lease') or ARGV[5]
redis.call('SADD', KEYS[2], ARGV[3])
redis.call('DEL', KEYS[3])
redis.call('HSET', KEYS[3], 'lease', lease, unpack(ARGV, 6))
redis.call('PEXPIRE', KEYS[3], ARGV[4])
return {epoch, lease}
"""
)

PUBLISH = Script(
    """
-- KEYS: objects. ARGV: holder, then the size of each object. Returns how many others hold each.
local holder, records, changes, others = ARGV[1], redis.call('MGET', unpack(KEYS)), {}, {}
local word = ' ' .. holder .. ' '
for i = 1, #KEYS do
  local size, record = ARGV[i + 1], records[i]
  -- A record of another size is about other bytes, which nobody can want under this key any more.
  if record and string.sub(record, 1, #size + 1) == size .. ' ' then
    local _, held = string.gsub(record, ' ', ' ')
    if string.find(record .. ' ', word, 1, true) then
      others[i] = held - 1
    else
      others[i] = held
      changes[#changes + 1] = KEYS[i]
      changes[#changes + 1] = record .. ' ' .. holder
    end
  else
    others[i] = 0
    changes[#changes + 1] = KEYS[i]
    changes[#changes + 1] = size .. ' ' .. holder
  end
end
if #changes > 0 then
  redis.call('MSET', unpack(changes))
end
return others
"""
)

_APPLY = """
local function apply(changes, gone)
  if #changes > 0 then
    redis.call('MSET', unpack(changes))
  end
  if #gone > 0 then
    redis.call('DEL', unpack(gone))
  end
end
"""

FORGET = Script(
    _APPLY
    + """
-- KEYS: objects, each once. ARGV: holder. Returns how many of them it held.
local records, changes, gone, count = redis.call('MGET', unpack(KEYS)), {}, {}, 0
local word = ' ' .. ARGV[1] .. ' '
for i = 1, #KEYS do
  if records[i] then
    local padded = records[i] .. ' '
    local from, to = string.find(padded, word, 1, true)
    if from then
      count = count + 1
      local rest = string.sub(padded, 1, from) .. string.sub(padded, to + 1, -2)
      if string.find(rest, ' .') then
        changes[#changes + 1] = KEYS[i]
        -- the last holder's removal leaves the separator before it
        changes[#changes + 1] = string.gsub(rest, ' $', '')
      else
        gone[#gone + 1] = KEYS[i]
      end
    end
  end
end
apply(changes, gone)
return count
"""
)

SWEEP = Script(
    _APPLY
    + """
-- KEYS: objects, then the node key of each suspect. ARGV: number of objects, then the id of each suspect.
-- Whether a suspect is dead is decided here, not by the caller: it may have come back since it was seen
-- missing.
local n, dead, changes, gone, count = tonumber(ARGV[1]), {}, {}, {}, 0
for i = n + 1, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    dead[ARGV[i - n + 1]] = true
  end
end
for i, record in ipairs(redis.call('MGET', unpack(KEYS, 1, n))) do
  if record then
    local kept, dropped = { string.match(record, '^[^ ]*') }, 0
    for word in string.gmatch(record, ' ([^ ]+)') do
      if dead[string.match(word, '^[^/]*')] then
        dropped = dropped + 1
      else
        kept[#kept + 1] = word
      end
    end
    if dropped > 0 then
      count = count + dropped
      if #kept > 1 then
        changes[#changes + 1] = KEYS[i]
        changes[#changes + 1] = table.concat(kept, ' ')
      else
        gone[#gone + 1] = KEYS[i]
      end
    end
  end
end
apply(changes, gone)
return count
"""
)

DECLARE = Script(
    """
-- KEYS: namespaces, namespace. ARGV: digest, TTL in ms, then fields and values.
redis.call('HSET', KEYS[2], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return redis.call('SADD', KEYS[1], ARGV[1])
"""
)

PRUNE = Script(
    """
-- KEYS: an index, then the key of each suspect member. ARGV: each suspect member. Drops those without a key.
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    redis.call('SREM', KEYS[1], ARGV[i - 1])
  end
end
return 0
"""
)

LEAVE = Script(
    """
-- KEYS: nodes, node. ARGV: node id.
redis.call('DEL', KEYS[2])
return redis.call('SREM', KEYS[1], ARGV[1])
"""
)
