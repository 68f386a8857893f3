"""SGLang plugin that lets HiCache run without a GPU: the copies, no pinning, no host reserve, the MLA path.

Found through the ``hicache_cpu_testbed`` entry point beside it. SGLang's own host pool classes stay in
charge; only the operations that they take from CUDA are bound to ``sgl_kernel.kvcacheio``, its torch
stand-in.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

logger = logging.getLogger(__name__)

POOLS = "sglang.srt.mem_cache.pool_host"
MODULES_THAT_COPY = (
    f"{POOLS}.mha",
    f"{POOLS}.mla",
    f"{POOLS}.dsa",
    f"{POOLS}.mamba",
    "sglang.srt.mem_cache.memory_pool_host",
)
# The base class, and the pools that allocate before they call it or never do.
POOLS_THAT_PIN = (
    f"{POOLS}.base.HostKVCache",
    f"{POOLS}.mamba.MambaPoolHost",
    f"{POOLS}.dsa.DSAIndexerPoolHost",
    "sglang.srt.mem_cache.memory_pool_host.DeepSeekV4PagedHostPool",
    "sglang.srt.mem_cache.memory_pool_host.DeepSeekV4StateHostPool",
)
TORCH_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
MLA_HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"


def without_pinning(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Host pools ask CUDA to pin their pages; there is no CUDA."""
    kwargs["pin_memory"] = False
    return original(self, *args, **kwargs)


def absorbed_mla(original: Callable[..., Any], cls: Any, backend_name: str) -> Callable[..., Any]:
    """The torch attention backend reads the latent cache, so MLA must take the absorbed path with it."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import _dispatch_mla_subtype

    handler: Callable[..., Any] = _dispatch_mla_subtype
    return handler


def bind_copies() -> None:
    """Give each module that copies between device and host the operations it imports only under CUDA."""
    import sgl_kernel.kvcacheio as copies

    operations = {name: value for name, value in vars(copies).items() if name.startswith("transfer_kv_")}
    for module_name in MODULES_THAT_COPY:
        module = importlib.import_module(module_name)
        for name, operation in operations.items():
            if not hasattr(module, name):
                setattr(module, name, operation)


def register() -> None:
    """Entry point: called by SGLang in every process before it builds anything."""
    import torch

    if torch.cuda.is_available():
        logger.warning("the CPU test bed is on PYTHONPATH of a machine with a GPU: it stays out of the way")
        return
    import sglang.srt.mem_cache.pool_host.base as pool_base

    # 10 GiB kept free for other processes by default: more than a small machine has.
    pool_base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    bind_copies()
    around = HookType.AROUND
    for pool in POOLS_THAT_PIN:
        HookRegistry.register(f"{pool}.__init__", without_pinning, around)
    if os.environ.get("TESTBED_ATTEND_NEW_ROWS") == "1":
        from cpu_attention import attend_new_rows

        HookRegistry.register(f"{TORCH_ATTENTION}._run_sdpa_forward_extend", attend_new_rows, around)
    HookRegistry.register(f"{MLA_HANDLERS}.AttentionBackendRegistry.get_handler", absorbed_mla, around)
