"""Which stores there are, by the name that ``ssd_store`` gives; other packages add theirs by entry point.

An entry point of the group ``hicache_mooncake.ssd_stores`` names a subclass of
:class:`hicache_mooncake.ssd.base.SsdStore`; stores of this package cannot be replaced.
"""

from __future__ import annotations

import importlib
from importlib import metadata

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.ssd.base import NO_HOOKS, Hooks, SsdStore, StoreConfig
from hicache_mooncake.ssd.io_base import DiskIO

GROUP = "hicache_mooncake.ssd_stores"

_BUILT_IN = {
    "bucket": "hicache_mooncake.ssd.bucket:BucketStore",
    "offset": "hicache_mooncake.ssd.offset:OffsetStore",
    "file_per_key": "hicache_mooncake.ssd.file_per_key:FilePerKeyStore",
    "shared": "hicache_mooncake.ssd.shared:SharedStore",
}


def names() -> list[str]:
    """Every store that can be named."""
    return sorted({*_BUILT_IN, *(point.name for point in metadata.entry_points(group=GROUP))})


def store_class(name: str) -> type[SsdStore]:
    """The class of a store. Raises ``ConfigError`` for a name that nobody has, or whose package does not work."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        points = [point for point in metadata.entry_points(group=GROUP) if point.name == name]
        if not points:
            raise ConfigError("ssd_store", name, f"one of {', '.join(names())} is expected")
        try:
            found = points[0].load()
        except Exception as error:  # another package's code: whatever it raises, the operator has to hear its name
            raise ConfigError("ssd_store", name, f"{points[0].value} cannot be loaded ({error})") from error
    if not (isinstance(found, type) and issubclass(found, SsdStore)):
        raise ConfigError("ssd_store", name, f"{found!r} is no SsdStore")
    return found


def create(name: str, config: StoreConfig, io: DiskIO, hooks: Hooks = NO_HOOKS) -> SsdStore:
    """A store, not open yet. Raises ``ConfigError``."""
    return store_class(name)(config, io, hooks)
