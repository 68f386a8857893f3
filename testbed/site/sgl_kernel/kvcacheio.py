"""SGLang's KV copies between device pool and host pool, in torch instead of CUDA.

Same names and arguments as the real ``sgl_kernel.kvcacheio``, so SGLang's host pools run unmodified. A
"device" buffer is layer-first: one tensor a layer, one row of ``item_size`` bytes a token. The suffixes name
the host layout:

* none: layer-first too, ``[layer][token][item]``
* ``pf``: page-first, ``[token][layer][item]``, so a token's layers are ``layout_dim`` bytes together
* ``ph``: page-head, ``[page][head][offset][layer][item / heads]``
* ``direct``: page-first-direct, ``[page][layer][offset][item]``

Some operations take a table of layer addresses (uint64) in place of tensors, as the GPU kernels do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


def _cpu(indices: torch.Tensor) -> torch.Tensor:
    return indices.to(device="cpu", dtype=torch.int64)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a contiguous tensor, in order, sharing its memory."""
    return tensor.view(-1).view(torch.uint8)


def _rows(tensor: torch.Tensor, item_size: int) -> torch.Tensor:
    return _bytes(tensor).view(-1, item_size)


def _rows_at(address: int, item_size: int, indices: torch.Tensor) -> torch.Tensor:
    """Rows of ``item_size`` bytes at ``address``, as many as ``indices`` reach."""
    count = int(indices.max()) + 1
    memory = (ctypes.c_uint8 * (count * item_size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, item_size)


def _layer_rows(
    tables: torch.Tensor | Sequence[torch.Tensor], item_size: int, indices: torch.Tensor
) -> list[torch.Tensor]:
    """A view a layer, from a table of addresses or from the layers' tensors."""
    if isinstance(tables, torch.Tensor) and tables.dtype == torch.uint64:
        return [_rows_at(address, item_size, indices) for address in tables.tolist()]
    return [_rows(layer, item_size) for layer in tables]


# --- one buffer a layer: latent (MLA) KV, index keys, mamba states -----------------------------------------


def transfer_kv_per_layer_mla(
    src: torch.Tensor, dst: torch.Tensor, src_indices: torch.Tensor, dst_indices: torch.Tensor, item_size: int
) -> None:
    _rows(dst, item_size)[_cpu(dst_indices)] = _rows(src, item_size)[_cpu(src_indices)]


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    start = layer_id * item_size
    host = _rows(src, src_layout_dim)[:, start : start + item_size]
    _rows(dst, item_size)[_cpu(dst_indices)] = host[_cpu(src_indices)]


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    source, target = _cpu(src_indices), _cpu(dst_indices)
    if not len(source):
        return
    device = _layer_rows(src_layers, item_size, source)
    host = _layer_rows(dst_layers, item_size, target)
    for layer in range(num_layers):
        host[layer][target] = device[layer][source]


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    source, target = _cpu(src_indices), _cpu(dst_indices)
    if not len(source):
        return
    host = _rows(dst, dst_layout_dim)
    for layer, rows in enumerate(_layer_rows(src_layers, item_size, source)[:num_layers]):
        host[:, layer * item_size : (layer + 1) * item_size][target] = rows[source]


def transfer_kv_mamba_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_mamba_lf_pf(
    src_ptrs: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    transfer_kv_all_layer_mla_lf_pf(src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


# --- K and V: the same copy twice --------------------------------------------------------------------------


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
) -> None:
    transfer_kv_per_layer_mla(src_k, dst_k, src_indices, dst_indices, item_size)
    transfer_kv_per_layer_mla(src_v, dst_v, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(source, target, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    for source, target in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(source, target, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    for source, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(source, target, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


def _page_head_rows(
    host: torch.Tensor, layer: int, item_size: int, layout_dim: int, page_size: int, heads: int
) -> torch.Tensor:
    """One layer of a page-head buffer as ``[page, offset, head, bytes]``."""
    pages = _bytes(host).view(-1, heads, page_size, layout_dim // item_size, item_size // heads)
    return pages[:, :, :, layer].permute(0, 2, 1, 3)


def transfer_kv_per_layer_ph_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    source, target = _cpu(src_indices), _cpu(dst_indices)
    for host, device in ((src_k, dst_k), (src_v, dst_v)):
        view = _page_head_rows(host, layer_id, item_size, src_layout_dim, page_size, head_num)
        rows = view[source // page_size, source % page_size]
        _rows(device, item_size)[target] = rows.reshape(len(source), item_size)


def transfer_kv_all_layer_lf_ph(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    source, target = _cpu(src_indices), _cpu(dst_indices)
    if not len(source):
        return
    for layers, host in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, rows in enumerate(_layer_rows(layers, item_size, source)[:num_layers]):
            view = _page_head_rows(host, layer, item_size, dst_layout_dim, page_size, head_num)
            view[target // page_size, target % page_size] = rows[source].view(len(source), head_num, -1)


# --- the "direct" copies (copy engine on a GPU): tensors, not addresses ------------------------------------


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    source, target = _cpu(src_indices), _cpu(dst_indices)
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[target] = src[source]


def _direct_rows(host: torch.Tensor, layer: int, device: torch.Tensor, page_size: int) -> torch.Tensor:
    """One layer of a page-first-direct buffer as ``[page, offset, item bytes]``."""
    item_size = device[0].numel() * device.element_size()
    return _bytes(host).view(host.shape[0], host.shape[1], page_size, item_size)[:, layer]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    source, target = _cpu(src_indices), _cpu(dst_indices)
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        view = _direct_rows(host, layer_id, device, page_size)
        _rows(device, view.shape[-1])[target] = view[source // page_size, source % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """``src_ptrs`` holds every layer of the first host buffer, then every layer of the second."""
    source, target = _cpu(src_indices), _cpu(dst_indices)
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, device in enumerate(src_ptrs):
        view = _direct_rows(dst_ptrs[number // layers], number % layers, device, page_size)
        view[target // page_size, target % page_size] = _rows(device, view.shape[-1])[source]
