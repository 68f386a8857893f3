"""How much a pool holds: bytes of KV a token, from a model's ``config.json``. Pure arithmetic.

The shapes are those of SGLang's host pools: MHA keeps K and V of every KV head and layer, MLA one latent vector and the
rotary part a layer (SGLang's ``MHATokenToKVPoolHost``, ``MLATokenToKVPoolHost``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hicache_mooncake.errors import ConfigError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}

REDIS_BYTES_A_PAGE = 250
"""Redis memory of one page's entry, key included; rounded up from what ``docs/redis.md`` tells."""


_HYBRID = ("layers_block_type", "hybrid_override_pattern", "mamba_d_state", "linear_num_key_heads")


@dataclass(frozen=True)
class Shape:
    """What of a model's shape its KV cache depends on. ``elements`` are numbers a token and layer, over all ranks."""

    layers: int
    elements: int
    kind: str

    def token_bytes(self, dtype: str) -> int:
        """Bytes of KV of one token, over all ranks. Raises ``ConfigError`` for a dtype that no pool has."""
        width = DTYPE_BYTES.get(dtype)
        if width is None:
            raise ConfigError("dtype", dtype, f"one of {', '.join(DTYPE_BYTES)} is expected")
        return self.layers * self.elements * width


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape in a Hugging Face ``config.json``; of a multimodal model that of its text part.

    Raises ``ConfigError`` where it names no attention that this arithmetic knows: hybrid models (Mamba, sliding
    windows) keep less, and are refused rather than guessed.
    """
    text = config.get("text_config", config)
    if any(text.get(name) for name in _HYBRID):
        allowed = "a model whose layers all attend to all tokens is expected"
        raise ConfigError("config.json", text.get("model_type"), allowed)
    try:
        layers = int(text["num_hidden_layers"])
        latent = text.get("kv_lora_rank")
        if latent:
            return Shape(layers, int(latent) + int(text["qk_rope_head_dim"]), "MLA")
        heads = int(text["num_attention_heads"])
        kv_heads = int(text.get("num_key_value_heads") or heads)
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError("config.json", text.get("model_type"), f"it does not say the shape of KV: {error}") from error
    return Shape(layers, 2 * kv_heads * head_dim, "MHA" if kv_heads == heads else "GQA")


@dataclass(frozen=True)
class Plan:
    """What ``pool_bytes`` of DRAM or SSD hold of one model."""

    token_bytes: int
    page_bytes: int
    tokens: int
    pages: int
    redis_bytes: int


def plan(shape: Shape, dtype: str, page_size: int, pool_bytes: int, *, watermark: float, parts: int = 1) -> Plan:
    """``page_size`` in tokens; ``parts`` objects a page (TP ranks of MHA; 1 for MLA), each with an entry in Redis.

    Counted to the watermark, above which pages go; an object takes whole 4 KiB.
    """
    token_bytes = shape.token_bytes(dtype)
    page_bytes = token_bytes * page_size
    footprint = -(-(page_bytes // parts) // 4096) * 4096 * parts
    pages = int(pool_bytes * watermark) // footprint
    return Plan(token_bytes, page_bytes, pages * page_size, pages, pages * parts * REDIS_BYTES_A_PAGE)
