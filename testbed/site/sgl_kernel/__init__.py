"""Torch-only stand-in for the CPU kernels SGLang imports from ``sgl_kernel``; ``kvcacheio`` has the KV
copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new KV slots into its row of the request-to-token table."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[offset : offset + last - first].to(req_to_token.dtype)
        offset += last - first


def __getattr__(name: str) -> Callable[..., Any]:
    """Any other kernel can be imported, as SGLang's modules do, and says so when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on the CPU test bed")

    absent.__name__ = name
    return absent
