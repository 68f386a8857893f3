"""SGLang's caches and host pools over this package's backend: every byte that went to L3 comes back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from testbed import component
from tests.pool import NodeProcess, running

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("warm_sglang")]

DIRECT = ("page_first", "page_first_direct")
EVERY = ("page_first", "page_first_direct", "layer_first", "page_head")

# attention, components, draft, layouts, pools
POOLS: tuple[tuple[str, tuple[str, ...], bool, tuple[str, ...], tuple[str, ...]], ...] = (
    ("mha", ("FULL",), False, EVERY, ("kv",)),
    ("mha-asymmetric", ("FULL",), False, DIRECT, ("kv",)),
    ("mha", ("FULL", "SWA"), False, EVERY, ("kv", "swa")),
    ("mha", ("FULL", "MAMBA"), False, DIRECT, ("kv", "mamba")),
    ("mla", ("FULL",), False, EVERY[:3], ("kv",)),
    ("dsa", ("FULL",), False, DIRECT, ("kv", "indexer")),  # index keys in layer_first cannot be stored in place
    ("mha", ("FULL",), True, EVERY[:1], ("kv", "draft")),
    ("mha", ("FULL", "SWA"), True, DIRECT, ("kv", "swa", "draft", "draft_swa")),
    ("mha", ("FULL", "MAMBA"), True, EVERY[:1], ("kv", "mamba", "draft")),
    ("mla", ("FULL",), True, EVERY[:1], ("kv", "draft")),
    ("dsa", ("FULL",), True, EVERY[:1], ("kv", "indexer", "draft", "draft_indexer")),
)
CASES = [
    (attention, components, draft, layout, pools)
    for attention, components, draft, layouts, pools in POOLS
    for layout in layouts
]
DYNAMIC = {
    "backend_name": "hicache-mooncake",
    "module_path": "hicache_mooncake.backend",
    "class_name": "MooncakeHiCacheStorage",
}

_runs = itertools.count()


@pytest.fixture(scope="module")
def node(redis_server: Any) -> Iterator[NodeProcess]:
    with running(NodeProcess(redis_server.url, settings={"segment_size": "256MiB"})) as (started,):
        yield started


def round_trip(node: NodeProcess, case: Any, backend: str = "mooncake", **options: Any) -> None:
    attention, components, draft, layout, pools = case
    # Every run stores the same tokens: without a tag of its own it would find what the run before it stored.
    extra = {"node": node.socket, "extra_backend_tag": str(next(_runs)), **options.pop("extra", {})}
    result = component.run(
        backend,
        attention=attention,
        components=components,
        draft=draft,
        layout=layout,
        extra=extra,
        **options,
    )
    assert result.identical, result
    assert result.pools == pools


def name(case: Any) -> str:
    attention, components, draft, layout, _ = case
    return "-".join((attention, *components, *(["draft"] if draft else []), layout))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_byte_comes_back(case: Any, node: NodeProcess) -> None:
    round_trip(node, case)


@pytest.mark.parametrize("case", [case for case in CASES if case[3] != "page_first_direct"], ids=name)
def test_every_byte_comes_back_through_a_small_l2(case: Any, node: NodeProcess) -> None:
    round_trip(node, case, buffer_only=True)


TENSORS: dict[str, Any] = {}
IN_PLACE = {"interface_v1": 1}
SHARED = {"interface_v1": 1, "allocator": "shm"}
BY_DYNAMIC = [
    *((CASES[at], TENSORS) for at in (0, 2, 6, 12, 15)),
    *((CASES[at], IN_PLACE) for at in (2, 8, 14)),
    *((CASES[at], SHARED) for at in (3, 10)),
]


@pytest.mark.parametrize(("case", "how"), BY_DYNAMIC, ids=lambda value: name(value) if isinstance(value, tuple) else "")
def test_every_byte_comes_back_by_dynamic(case: Any, how: dict[str, Any], node: NodeProcess) -> None:
    round_trip(node, case, "dynamic", extra={**DYNAMIC, **how})
