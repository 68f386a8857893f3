"""SGLang's caches and host pools over its own ``file`` backend: the bed other backends are tested on."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import component

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("warm_sglang")]

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
CASES = [
    *(("mha", ("FULL",), layout, ("kv",)) for layout in (*LAYOUTS, "page_head")),
    *(("mha", ("FULL", "SWA"), layout, ("kv", "swa")) for layout in (*LAYOUTS, "page_head")),
    # Mamba's host pool has page-first layouts only.
    *(("mha", ("FULL", "MAMBA"), layout, ("kv", "mamba")) for layout in LAYOUTS[1:]),
    *(("mla", ("FULL",), layout, ("kv",)) for layout in LAYOUTS),
    *(("dsa", ("FULL",), layout, ("kv", "indexer")) for layout in LAYOUTS),
]


@pytest.mark.parametrize("buffer_only", [False, True], ids=["cache", "buffer_only"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join((case[0], *case[1], case[2])))
def test_every_byte_comes_back_from_l3(
    case: tuple[str, tuple[str, ...], str, tuple[str, ...]], buffer_only: bool, tmp_path: Path
) -> None:
    attention, components, layout, pools = case
    result = component.run(
        "file",
        attention=attention,
        components=components,
        layout=layout,
        buffer_only=buffer_only,
        env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)},
    )
    assert result.identical, result
    assert result.pools == pools
    assert list(tmp_path.iterdir())


DRAFTS = [
    ("mha", ("FULL",), ("kv", "draft")),
    ("mha", ("FULL", "SWA"), ("kv", "swa", "draft", "draft_swa")),
    ("mha", ("FULL", "MAMBA"), ("kv", "mamba", "draft")),
    ("mla", ("FULL",), ("kv", "draft")),
    ("dsa", ("FULL",), ("kv", "indexer", "draft", "draft_indexer")),
]


@pytest.mark.parametrize("buffer_only", [False, True], ids=["cache", "buffer_only"])
@pytest.mark.parametrize("case", DRAFTS, ids=lambda case: "-".join((case[0], *case[1])))
def test_a_draft_model_s_pools_come_back_too(
    case: tuple[str, tuple[str, ...], tuple[str, ...]], buffer_only: bool, tmp_path: Path
) -> None:
    attention, components, pools = case
    result = component.run(
        "file",
        attention=attention,
        components=components,
        draft=True,
        buffer_only=buffer_only,
        env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)},
    )
    assert result.identical, result
    assert result.pools == pools


def test_one_wrong_bit_is_noticed(tmp_path: Path) -> None:
    backend = {
        "backend_name": "flipping",
        "module_path": "tests.sglang.flipping_backend",
        "class_name": "FlippingBackend",
    }
    result = component.run("dynamic", extra=backend, env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)})
    assert (result.on_device, result.different) == (result.tokens, 1)
    assert not result.identical


def test_a_failed_run_shows_its_output() -> None:
    with pytest.raises(RuntimeError, match="no round trip for mla with FULL, SWA"):
        component.run("file", attention="mla", components=("FULL", "SWA"))
