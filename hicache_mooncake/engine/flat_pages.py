"""Pages handed over as tensors, for SGLang's generic storage calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hicache_mooncake.engine.host_pools import Located


def by_size(tensors: Sequence[Any]) -> Iterator[tuple[list[int], Located]]:
    """Positions and places of the tensors, by size; what is no page of bytes in host memory is left out."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        if tensor is not None and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes:
            groups[tensor.nbytes].append(position)
    for size, positions in groups.items():
        addresses = np.array([[tensors[at].data_ptr()] for at in positions], dtype=np.uint64)
        yield positions, Located(addresses, [size])
