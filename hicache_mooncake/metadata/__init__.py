"""The directory of a pool in Redis, and a private Redis for hosts that have none."""

from hicache_mooncake.metadata.directory import Directory
from hicache_mooncake.metadata.records import NodeRecord, ObjectRecord

__all__ = ["Directory", "NodeRecord", "ObjectRecord"]
