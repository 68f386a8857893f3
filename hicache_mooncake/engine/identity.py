"""Who this engine is: the part of a page's identity that SGLang's configuration tells, before any pool is seen."""

from __future__ import annotations

import json
from typing import Any

from hicache_mooncake.config import Settings
from hicache_mooncake.engine.checkpoint import fingerprint, of_file
from hicache_mooncake.radix_bridge import Shards, shards_of_rank

PLAIN_KV = ("", "auto", "bf16", "bfloat16", "float16", "half")
"""KV dtypes that the host pool's own dtype tells as well: ``auto`` on one engine and ``bf16`` on another may share."""


def deployment(config: Any, settings: Settings) -> dict[str, str]:
    """Fields that all of an engine's namespaces share.

    ``config`` is SGLang's ``HiCacheStorageConfig``. What it does not carry is taken from SGLang's published
    configuration, which is empty where a tool drives the backend without a server.

    - Which weights: ``revision`` is the operator's word if given; else a look at the files, since the model's name is
      whatever was typed and may have stood for others yesterday.
    - ``kv_cache_dtype``: all fp8 variants are the same ``uint8`` to the pool, whatever their scales.
    - ``overrides`` of the model's configuration, such as a longer rope, change every K.
    """
    revision = settings.revision or published("revision")
    kv_cache_dtype = published("kv_cache_dtype")
    version = published("weight_version")
    return {
        "model": str(getattr(config, "model_name", None) or ""),
        "revision": revision,
        "weights": "" if settings.revision else fingerprint(published("model_path"), revision),
        "weight_version": "" if version == "default" else version,
        "kv_cache_dtype": "" if kv_cache_dtype in PLAIN_KV else kv_cache_dtype,
        "kv_scales": of_file(published("quantization_param_path")),
        "fp8": _fp8_format(),
        "quantization": published("quantization"),
        "overrides": _canonical(published("json_model_override_args")),
        "tenant": settings.tenant,
        "tag": settings.extra_backend_tag,
    }


def draft(settings: Settings) -> dict[str, str]:
    """Further fields of pools that hold a draft model's pages: which one."""
    model, revision = published("speculative_draft_model_path"), published("speculative_draft_model_revision")
    return {
        "draft_model": fingerprint(model, revision) or model,
        "draft_revision": revision,
        "draft_quantization": published("speculative_draft_model_quantization"),
        "draft_kv_cache_dtype": published("speculative_draft_kv_cache_dtype"),
    }


def published(name: str) -> str:
    """A value of SGLang's configuration in this process, as text; empty when there is none."""
    try:
        from sglang.srt.runtime_context import get_context  # noqa: PLC0415
    except ImportError:
        return ""
    try:
        value = get_context().config_leaf(name)
    except (ValueError, AttributeError):
        return ""  # not published, or not a setting of this release
    return "" if value is None else str(value)


def _fp8_format() -> str:
    """Names the platform's float8 where it is not the usual one: some AMD GPUs read the same bytes as other numbers."""
    try:
        from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype  # noqa: PLC0415
    except ImportError:
        return ""
    name = str(fp8_dtype).removeprefix("torch.")
    return "" if name == "float8_e4m3fn" else name


def _canonical(text: str) -> str:
    try:
        parsed = json.loads(text or "{}")
    except ValueError:
        return text
    return json.dumps(parsed, sort_keys=True) if parsed else ""


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


def is_first_rank(config: Any) -> bool:
    """Whether of all ranks that move the same tokens this one counts them."""
    names = ("tp_rank", "pp_rank", "attn_cp_rank", "dcp_rank")
    return not any(getattr(config, name, 0) for name in names)


def label(config: Any) -> str:
    """The rank, for logs: model and coordinates."""
    text = f"{getattr(config, 'model_name', None) or 'model'} tp{config.tp_rank}/{config.tp_size}"
    for name, rank, size in (("pp", "pp_rank", "pp_size"), ("cp", "attn_cp_rank", "attn_cp_size")):
        if getattr(config, size, 1) > 1:
            text += f" {name}{getattr(config, rank)}/{getattr(config, size)}"
    return text
