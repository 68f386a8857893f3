from __future__ import annotations

from tests.warm_sglang import warm_sglang

__all__ = ["warm_sglang"]
