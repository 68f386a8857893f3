"""``hicache-mooncake ssd`` on real stores."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake.cli import main
from hicache_mooncake.ssd.io_threads import ThreadIO
from tests.ssd.stores import PAGE, Pages, flip_page, key_of, make, soon, write_all


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = main(["ssd", *arguments, "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out) if captured.out else {}, captured.err


@pytest.mark.parametrize("name", ["bucket", "offset", "file_per_key", "shared"])
def test_inspect_verify_compact_import(
    name: str, tmp_path: Path, pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    with ThreadIO() as io, make(name, path, io, pool="chat") as store:
        store.open()
        write_all(store, pages, range(60))
        store.remove([key_of(number) for number in range(0, 40, 2)])
    status, facts, _ = run(capsys, "inspect", str(path))
    assert status == 0 and facts["store"] == name and facts["pool"] == "chat"
    assert facts["by_namespace"] == {"00112233aabbccdd": 40}
    assert facts["bytes_by_namespace"] == {"00112233aabbccdd": 40 * PAGE}
    assert run(capsys, "verify", str(path))[0] == 0
    status, facts, _ = run(capsys, "compact", str(path))
    assert status == 0 and (facts["given_back"] > 0) == (name == "bucket")
    flip_page(path, 41)
    status, facts, _ = run(capsys, "verify", str(path), "--bandwidth", "1gb")
    assert status == 1 and facts["rotten_keys"] == [key_of(41)] and facts["checked"] == 40
    other = "offset" if name == "bucket" else "bucket"
    status, facts, _ = run(capsys, "import", str(path), str(copy), "--store", other, "--size", "32mb")
    assert status == 0 and facts["copied"] == 39 == facts["held"]
    with ThreadIO() as io, make(other, copy, io, pool="chat", capacity=32 << 20) as store:
        assert store.open().entries == 39
        outcomes = pages.read(store, [*range(60)])
        assert sum(outcome == 0 for outcome in outcomes.values()) == 39
    assert main(["ssd", "inspect", str(copy)]) == 0
    assert "by_namespace" in capsys.readouterr().out


def test_what_cannot_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str], pages: Pages) -> None:
    assert run(capsys, "inspect", str(tmp_path / "nowhere"))[0] == 2
    status, _, error = run(capsys, "inspect", str(tmp_path))
    assert status == 2 and "no SSD store" in error
    with ThreadIO() as io, make("bucket", tmp_path / "store", io) as store:
        store.open()
        status, _, error = run(capsys, "verify", str(tmp_path / "store"))
        assert status == 2 and "another process uses it" in error
    assert run(capsys, "import", str(tmp_path / "store"), str(tmp_path / "store"), "--size", "1gb")[0] == 2
    assert run(capsys, "import", str(tmp_path / "store"), str(tmp_path / "new"), "--size", "much")[0] == 2


def test_the_documents_examples_print_what_is_shown(
    tmp_path: Path, pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = tmp_path / "kv", tmp_path / "nvme"
    with ThreadIO() as io, make("bucket", path, io) as store:
        store.open()
        assert store.write(pages.batch(range(10)), soon())
    document = (Path(__file__).parent.parent.parent / "docs" / "ssd.md").read_text()
    [block] = re.findall(r"```console\n(.*?)```", document, re.DOTALL)
    examples = [example.splitlines() for example in block.split("$ hicache-mooncake ")[1:]]
    assert {example[0].split()[1] for example in examples} == {"inspect", "verify", "compact", "import"}
    for command, *shown in examples:
        arguments = command.replace("/var/cache/kv", str(path)).replace("/mnt/nvme/kv", str(other)).split()
        assert main(arguments) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in printed][: len(shown)] == [line.split()[0] for line in shown]
        if shown:
            assert "objects              10" in printed and "bytes                655360" in printed
