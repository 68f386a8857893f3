"""Who this engine is: the part of a page's identity that SGLang's configuration tells, before any pool is seen."""

from __future__ import annotations

import logging
from typing import Any

from hicache_mooncake.config import Settings
from hicache_mooncake.radix_bridge import Shards, shards_of_rank

logger = logging.getLogger(__name__)


def deployment(config: Any, settings: Settings) -> dict[str, str]:
    """Fields that all of an engine's namespaces share.

    ``config`` is SGLang's ``HiCacheStorageConfig``. What it does not carry (the weights' revision, the logical KV
    dtype, quantisation) is taken from SGLang's published configuration where this process has one: fp8 variants are
    the same ``uint8`` to the pool.
    """
    model = _sglang_config()
    return {
        "model": str(getattr(config, "model_name", None) or ""),
        "revision": settings.revision or model.get("revision", ""),
        "kv_cache_dtype": model.get("kv_cache_dtype", ""),
        "quantization": model.get("quantization", ""),
        "tenant": settings.tenant,
        "tag": settings.extra_backend_tag,
    }


def _sglang_config() -> dict[str, str]:
    try:
        from sglang.srt.runtime_context import get_model, get_server_args  # noqa: PLC0415
    except ImportError:
        return {}
    found: dict[str, str] = {}
    for source, names in ((get_model, ("kv_cache_dtype", "quantization")), (get_server_args, ("revision",))):
        try:
            bag = source()
        except ValueError:
            continue  # not published: a tool drives the backend without a server
        for name in names:
            found[name] = str(getattr(bag, name, None) or "")
    return found


def shards(config: Any, *, replicated: bool, head_shards: int) -> Shards:
    """The parts of a page that this rank holds, by its coordinates in SGLang's configuration."""
    return shards_of_rank(
        replicated=replicated,
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=getattr(config, "pp_rank", 0),
        pp_size=getattr(config, "pp_size", 1),
        cp_rank=getattr(config, "attn_cp_rank", 0),
        cp_size=getattr(config, "attn_cp_size", 1),
        dcp_rank=getattr(config, "dcp_rank", 0),
        dcp_size=getattr(config, "dcp_size", 1),
        head_shards=head_shards,
    )


def label(config: Any) -> str:
    """The rank, for logs: model and coordinates."""
    text = f"{getattr(config, 'model_name', None) or 'model'} tp{config.tp_rank}/{config.tp_size}"
    for name, rank, size in (("pp", "pp_rank", "pp_size"), ("cp", "attn_cp_rank", "attn_cp_size")):
        if getattr(config, size, 1) > 1:
            text += f" {name}{getattr(config, rank)}/{getattr(config, size)}"
    return text
