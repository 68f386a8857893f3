"""SGLang's host pools as this package sees them: which bytes make a page, where they lie, and what names their format.

Everything is read from the real pool object by the interface that SGLang's storage backends use
(``get_page_buffer_meta``, SGLang 0.5.23 ``mem_cache/pool_host``), never recomputed, so a new pool class works as soon
as it answers that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.radix_bridge import Namespace, Shards

LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first", "page_first_kv_split")
"""Layouts whose pages this package knows to be whole in the buffers that the pool names."""

_MAX_EXTENTS = 512
"""Extents of one page: 2 x 128 layers of a layer-first pool, with room."""


class Located(NamedTuple):
    """Where pages lie: ``addresses[page, extent]``, and the bytes of each extent of an object, the same for all."""

    addresses: npt.NDArray[np.uint64]
    lengths: list[int]


class HostPool:
    """One registered pool: KV, or a side pool such as mamba, swa, indexer, draft.

    ``shards`` says which parts of each page this rank holds: with several, the pool's heads are cut into as many.
    """

    def __init__(self, name: str, pool: Any, shards: Shards, *, page_tokens: int | None = None) -> None:
        """``page_tokens``: token slots a page takes in ``host_indices``, where that is not the pool's own page size.

        Raises ``ConfigError`` for a layout whose pages cannot be addressed.
        """
        self.name = name
        self.pool = pool
        self.shards = shards
        self.page_tokens = page_tokens or int(getattr(pool, "page_size", 1) or 1)
        self.layout = str(getattr(pool, "layout", "none"))
        self._slots = int(getattr(pool, "logical_size", 0) or getattr(pool, "size", 0))
        if self.layout != "none" and self.layout not in LAYOUTS:
            raise ConfigError(
                "--hicache-mem-layout",
                self.layout,
                f"pool {name!r} is stored from one of {', '.join(LAYOUTS)}",
            )
        try:
            self._lengths = self._probe()
        except (AttributeError, NotImplementedError, ValueError, AssertionError) as error:
            if len(shards.parts) > 1:
                heads = getattr(pool, "head_num", 0)
                raise ConfigError(
                    "tp_lcm_size",
                    shards.fields.get("tp"),
                    f"the {heads} KV heads of a rank cannot be cut into {len(shards.parts)} shards",
                    hint="a multiple of every TP size that shares pages, and at most the model's number of KV heads",
                ) from error
            raise ConfigError(
                "--hicache-mem-layout",
                self.layout,
                f"the pages of pool {name!r} ({type(pool).__name__}) cannot be addressed: {error}",
                hint="use --hicache-mem-layout page_first or page_first_direct",
            ) from error

    def _probe(self) -> list[int]:
        import torch  # noqa: PLC0415 - only where a pool exists does torch, and its import takes seconds

        pointers, sizes = self._meta(torch.arange(self.page_tokens, dtype=torch.int64))
        parts = len(self.shards.parts)
        if not pointers or len(pointers) != len(sizes) or len(pointers) % parts:
            raise ValueError(f"{len(pointers)} buffers a page for {parts} parts")
        if len(pointers) > _MAX_EXTENTS:
            raise ValueError(f"{len(pointers)} buffers a page, at most {_MAX_EXTENTS} are handled")
        extents = len(pointers) // parts
        lengths = [int(size) for size in sizes[:extents]]
        if [int(size) for size in sizes] != lengths * parts or min(lengths) <= 0:
            raise ValueError(f"uneven buffers {sizes}")
        return lengths

    def _meta(self, host_indices: Any) -> tuple[Sequence[int], Sequence[int]]:
        parts = len(self.shards.parts)
        if parts > 1:
            return self.pool.get_split_heads_page_buffer_meta(host_indices, parts)  # type: ignore[no-any-return]
        return self.pool.get_page_buffer_meta(host_indices)  # type: ignore[no-any-return]

    @property
    def object_bytes(self) -> int:
        """Bytes of one object: one part of one page."""
        return sum(self._lengths)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this rank."""
        return self.object_bytes * len(self.shards.parts)

    def locate(self, host_indices: Any, pages: int) -> Located:
        """Where the ``pages`` pages of ``host_indices`` lie. The indices are read once, here.

        Raises ``ValueError`` when the indices are not those of so many pages of the pool.
        """
        indices = host_indices.detach().cpu()
        if len(indices) != pages * self.page_tokens:
            raise ValueError(
                f"pool {self.name!r}: {len(indices)} host indices for {pages} pages of {self.page_tokens} tokens"
            )
        if pages and not 0 <= int(indices.min()) <= int(indices.max()) < self._slots:
            raise ValueError(f"pool {self.name!r}: host indices beyond its {self._slots} slots")
        pointers, sizes = self._meta(indices)
        objects = pages * len(self.shards.parts)
        if len(pointers) != objects * len(self._lengths) or list(sizes) != self._lengths * objects:
            raise ValueError(f"pool {self.name!r}: the buffers of its pages are not what they were when registered")
        return Located(np.array(pointers, dtype=np.uint64).reshape(objects, len(self._lengths)), self._lengths)

    @property
    def holds_draft(self) -> bool:
        """Whether pages hold a draft model's state: all of it, or layers packed behind the target's."""
        target = getattr(self.pool, "target_layer_num", None)
        packed = target is not None and getattr(self.pool, "layer_num", target) != target
        return self.name.startswith("draft") or packed or bool(getattr(self.pool, "mtp_draft_buffer_infos", ()))

    def buffers(self) -> list[tuple[int, int]]:
        """``(address, bytes)`` of the tensors the pool consists of; none for a pool that only counts pages."""
        pool = self.pool
        if hasattr(pool, "get_hybrid_pool_buffer"):
            tensors = pool.get_hybrid_pool_buffer()
        else:
            tensors = getattr(pool, "kv_buffer", None)
        if tensors is None:
            return []
        if not isinstance(tensors, list | tuple):
            tensors = [tensors]
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor is not None and tensor.nbytes]

    def namespace(self, deployment: Mapping[str, str]) -> Namespace:
        """The namespace of this pool's pages: the deployment's fields and what the bytes of a page look like."""
        pool = self.pool
        shape = {
            name: str(getattr(pool, name))
            for name in ("layer_num", "target_layer_num", "head_dim", "v_head_dim", "start_layer", "end_layer")
            if isinstance(getattr(pool, name, None), int)
        }
        if isinstance(getattr(pool, "head_num", None), int):
            # Heads of an object, not of the rank: ranks of other TP sizes hold more or fewer of the same objects.
            shape["head_num"] = str(pool.head_num // len(self.shards.parts))
        for name in ("temporal_dtype", "conv_dtype"):
            if hasattr(pool, name):
                shape[name] = _dtype(getattr(pool, name))
        return Namespace.describe(
            **{
                **deployment,
                **self.shards.fields,
                **shape,
                "pool": self.name,
                "pool_class": type(pool).__name__,
                "dtype": _dtype(getattr(pool, "dtype", "none")),
                "layout": self.layout,
                "page_size": str(self.page_tokens),
                "page_bytes": "+".join(map(str, self._lengths)),
                "format": str(getattr(pool, "storage_format_tag", None) or ""),
            }
        )


def is_logical(pool: Any) -> bool:
    """Whether a KV pool only hands out indices and its bytes lie in side pools (DeepSeek V4's anchor)."""
    return getattr(pool, "kv_buffer", None) is None and not getattr(pool, "layer_num", 0)


def is_rank_sharded(name: str, pool: Any, *, replicated: bool) -> bool:
    """Whether each tensor-parallel rank holds other bytes of a page in this pool.

    KV is, unless SGLang says that ranks replicate it (MLA). Mamba state is cut by rank even then, and so is any pool
    with separate K and V heads, such as an EAGLE draft's over an MLA target.
    """
    if not replicated or name == "mamba":
        return True
    return hasattr(pool, "v_buffer") or any(cls.__name__ == "MHATokenToKVPoolHost" for cls in type(pool).__mro__)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
