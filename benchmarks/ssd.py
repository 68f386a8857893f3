"""What batches from the SSD tier cost, beside plain O_DIRECT reads of the same disk: ``python -m benchmarks.ssd``.

Starts a Redis and two nodes of its own, the first with an SSD tier and a segment for a fraction of the pages; this
process is the engine. For each page size batches are fetched that lie on disk alone, from the node of the same host and
from the other one over TCP, in turn with plain reads of a file on the same disk: one thread, a MiB at a time, and four
threads. Every kind of fetch is checked byte by byte once, outside of the clock.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.report import Figure, Judgement
from benchmarks.samples import Sample, Series, interleave, measure, ratio
from hicache_mooncake.config_values import size as parse_size
from hicache_mooncake.metadata.redis_server import PrivateRedis
from tests.pool import Engine, NodeProcess, eventually, hashes, running

SEGMENT = 64 << 20
STEP = 1 << 20
READERS = 4

Take = Callable[[], Sample]


class PlainFile:
    """A file on the disk in question, read past the page cache into memory of this process."""

    def __init__(self, directory: Path, size: int) -> None:
        self.size = size
        self._buffers = [mmap.mmap(-1, STEP) for _ in range(READERS)]
        self._pool = ThreadPoolExecutor(READERS)
        path = directory / "plain"
        block = os.urandom(STEP)
        with open(path, "wb") as file:
            for _ in range(-(-size // STEP)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))

    def read(self, threads: int) -> None:
        """All of it once. Raises ``OSError``."""
        wait([self._pool.submit(self._part, at, threads) for at in range(threads)])

    def _part(self, first: int, threads: int) -> None:
        for offset in range(first * STEP, self.size, threads * STEP):
            os.preadv(self._fd, [self._buffers[first]], offset)

    def close(self) -> None:
        os.close(self._fd)
        self._pool.shutdown()


def main() -> None:
    arguments = _arguments()
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    figures: list[Figure] = []
    judgements: list[Judgement] = []
    directory = Path(tempfile.mkdtemp(prefix="hicache-mooncake-bench-", dir=arguments.directory))
    try:
        for size in sizes:
            print(f"pages of {report.size_name(size)}, {arguments.rounds} rounds", file=sys.stderr, flush=True)
            of_size = _bench(directory, size, arguments)
            figures += of_size[0]
            judgements += of_size[1]
    finally:
        shutil.rmtree(directory)
    report.show(figures, judgements)
    if arguments.json:
        settings = {"pages": arguments.pages, "rounds": arguments.rounds, "sizes": sizes, "store": arguments.store}
        Path(arguments.json).write_text(report.as_json(settings, figures, judgements) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ssd", description=__doc__)
    parser.add_argument("--sizes", default="64KiB,256KiB,1MiB,4MiB", help="page sizes")
    parser.add_argument("--pages", type=int, default=128, help="pages of a batch")
    parser.add_argument("--batches", type=int, default=4, help="batches on disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", default="bucket", help="bucket, offset, file_per_key or shared")
    parser.add_argument("--directory", default="/var/tmp", help="on the disk to be measured")
    parser.add_argument("--quick", action="store_true", help="two rounds of few calls: shows that it works")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.batches = min(arguments.rounds, 2), min(arguments.batches, 2)
    return arguments


def _bench(directory: Path, size: int, arguments: argparse.Namespace) -> tuple[list[Figure], list[Judgement]]:
    pages, batches = arguments.pages, arguments.batches
    batch_bytes = size * pages
    names = ["get from SSD", "get from SSD of the other host", "plain O_DIRECT, 1 thread", "plain O_DIRECT, 4 threads"]
    near, far, plain, plain4 = series = [Series(name, batch_bytes, pages) for name in names]
    with ExitStack() as undo:
        redis = undo.enter_context(PrivateRedis())
        place = directory / f"pages-{size}"
        settings = {
            "segment_size": max(SEGMENT, 4 * size),
            "ssd_path": str(place),
            "ssd_store": arguments.store,
            "ssd_size": 2 * batch_bytes * batches + (1 << 30),
            "ssd_staging": max(64 << 20, 32 * size),
            "promotion_threshold": 0,
        }
        owner = NodeProcess(redis.url, "near", settings)
        other = NodeProcess(redis.url, "far", {"segment_size": 0})
        undo.enter_context(running(owner, other))
        undo.callback(shutil.rmtree, place, ignore_errors=True)
        writer = undo.enter_context(Engine(owner.socket, page_bytes=size, pages=pages, op_timeout=60))
        reader = undo.enter_context(Engine(other.socket, page_bytes=size, pages=pages, op_timeout=60))
        stored = [hashes(f"ssd/{size}/{batch}", pages) for batch in range(batches)]
        _store(writer, [name for of_batch in stored for name in of_batch], size)
        # What lies in DRAM still is pushed out by pages that nobody asks for.
        _store(writer, hashes(f"ssd/{size}/last", 2 * int(settings["segment_size"]) // size + 1), size)
        file = PlainFile(directory, batch_bytes)
        undo.callback(file.close)
        turns = partial(next, itertools.cycle(range(batches)))
        pids = [owner.pid, other.pid]

        def get(engine: Engine) -> Sample:
            of_batch = stored[turns()]
            engine.exists(of_batch)  # as SGLang does before it fetches
            return measure(lambda: _expect(engine.get(of_batch)), pids)

        takes: list[Take] = [
            partial(get, writer),
            partial(get, reader),
            lambda: measure(lambda: file.read(1), []),
            lambda: measure(lambda: file.read(READERS), []),
        ]
        for engine in (writer, reader):
            _expect(engine.check(stored[0]))
        for warm_up in takes:
            warm_up()
        calls = 2 if arguments.quick else max(2, (256 << 20) // batch_bytes)
        interleave(list(zip(series, takes, strict=True)), arguments.rounds, calls)
        before = writer.stats()
        if before.get("get_local", 0) > before.get("get_ssd_local", 0):
            raise RuntimeError("most pages came from DRAM: this measures something else")
    judgements = [
        Judgement("get from SSD / plain O_DIRECT, 4 threads", size, ratio(near, plain4), None),
        Judgement("get from SSD / plain O_DIRECT, 1 thread", size, ratio(near, plain), None),
        Judgement("get from SSD of the other host / plain O_DIRECT, 4 threads", size, ratio(far, plain4), None),
    ]
    return [Figure.of(of, size) for of in series], judgements


def _store(engine: Engine, names: list[str], size: int) -> None:
    """Put pages in steps, each of which is on disk before the next comes."""
    step = max(1, (16 << 20) // size)
    for start in range(0, len(names), min(step, engine.pages)):
        engine.store(names[start : start + min(step, engine.pages)])
        eventually(lambda: engine.stats()["ssd_offload_queue"] == 0, timeout=60, what="the queue is written")


def _expect(hits: list[bool]) -> None:
    if not all(hits):
        raise RuntimeError(f"{hits.count(False)} of {len(hits)} pages were not fetched")


if __name__ == "__main__":
    main()
