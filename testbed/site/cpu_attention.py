"""Prefill attention whose cost follows the tokens that are computed, as on a GPU.

SGLang's torch backend pads the new tokens' queries to the whole sequence, so a prompt found in a cache costs
as much attention as one computed from nothing, and what a cache saves cannot be seen in the time to the first
token. The results differ from SGLang's own by rounding, as any two kernels do; hence only on request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend_new_rows(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands around ``TorchNativeAttnBackend._run_sdpa_forward_extend``; unusual attention goes to the
    original.
    """
    query, output, keys, values, slots, rows, lengths, prefixes, extends, encoder = args
    if encoder is not None or not kwargs["causal"] or kwargs["sliding_window_size"] is not None:
        return original(self, *args, **kwargs)
    start = 0
    for row, length, prefix, extend in zip(
        rows.tolist(), lengths.tolist(), prefixes.tolist(), extends.tolist(), strict=True
    ):
        found = slots[row, :length]
        new = query[start : start + extend].movedim(0, 1)[None]
        mask = torch.ones(extend, length, dtype=torch.bool).tril(prefix) if prefix else None
        attended = scaled_dot_product_attention(
            new,
            keys[found].movedim(0, 1)[None].to(new.dtype),
            values[found].movedim(0, 1)[None].to(new.dtype),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=kwargs["enable_gqa"],
            scale=kwargs["scaling"],
        )
        output[start : start + extend] = attended[0].movedim(1, 0)
        start += extend
    return output
