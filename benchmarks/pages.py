"""How fast pages move and what that costs each process, beside what the machine can do: ``python -m benchmarks.pages``.

Starts a Redis and two nodes of its own; this process is the engine. For each page size, batches are put, fetched from
the node of the same host and fetched from the other node over TCP, in turn with copies of the same pages and with a
plain TCP stream, so that other load on the machine meets all of them alike. Then existence queries beside bare calls
of Redis. Every kind of fetch is checked byte by byte once, outside the clock.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.limits import BareRedis, ThreadedCopy, copy_and_hash_pages, copy_pages, plain_stream
from benchmarks.pool_bench import Pages, Pool, running_pool
from benchmarks.report import Figure, Judgement
from benchmarks.samples import Sample, Series, Spread, interleave, measure, ratio
from hicache_mooncake.config_values import size as parse_size
from hicache_mooncake.protocol import messages as m
from tests.pool import Engine, hashes

COLD = 256 << 20
"""Bytes that batches go round in: far more than a processor's cache holds, as L2 and segment are."""

CALL_BYTES = 128 << 20
"""Bytes of each kind that one round moves at least, so that a round's median means something."""

IN_A_ROW = 4
"""Calls of a kind that follow each other, as a long prompt's prefetch makes them: the first finds cold caches."""

ENGINE_CPU_AIM = 0.1
"""CPU seconds a GB: a tenth of a core at 1 GB/s."""

Take = Callable[[], Sample]


def main() -> None:
    arguments = _arguments()
    sizes = [parse_size(text) for text in arguments.sizes.split(",")]
    pages = arguments.pages
    cold = parse_size(arguments.cold)
    footprints = [_batches(size, pages, cold) * size * pages for size in sizes]
    figures: list[Figure] = []
    judgements: list[Judgement] = []
    started = time.monotonic()
    _say(f"starting Redis and two nodes, segment for {2 * max(footprints) >> 20} MiB of pages")
    with running_pool(max(footprints)) as pool:
        for size in sizes:
            _say(f"pages of {report.size_name(size)}, {arguments.rounds} rounds")
            of_size = _bench_pages(pool, size, pages, _batches(size, pages, cold), arguments)
            figures += of_size[0]
            judgements += of_size[1]
        _say("existence queries")
        of_keys = _bench_exists(pool, arguments)
        figures += of_keys[0]
        judgements += of_keys[1]
    _say(f"done in {time.monotonic() - started:.0f} s")
    report.show(figures, judgements)
    if arguments.json:
        settings = {"pages": pages, "rounds": arguments.rounds, "sizes": sizes, "keys": arguments.keys}
        Path(arguments.json).write_text(report.as_json(settings, figures, judgements) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--sizes", default="64KiB,256KiB,1MiB,4MiB", help="page sizes")
    parser.add_argument("--pages", type=int, default=128, help="pages of a batch")
    parser.add_argument("--keys", type=int, default=128, help="keys of an existence query")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", default=str(COLD), help="bytes that batches go round in")
    parser.add_argument("--quick", action="store_true", help="two rounds of few calls: shows that it works")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 2)
        arguments.cold = str(min(parse_size(arguments.cold), 32 << 20))
    return arguments


def _batches(page_bytes: int, pages: int, cold: int) -> int:
    return max(1, cold // (page_bytes * pages))


def _bench_pages(
    pool: Pool, page_bytes: int, pages: int, batches: int, arguments: argparse.Namespace
) -> tuple[list[Figure], list[Judgement]]:
    batch_bytes = page_bytes * pages
    names = ["put", "get same host", "get over TCP", "memcpy", "memcpy + xxh3", "memcpy 2 threads", "plain TCP stream"]
    put, near, far, copy, hashed, threaded, plain = series = [Series(name, batch_bytes, pages) for name in names]
    with ExitStack() as undo:
        data = Pages(pool, page_bytes, pages, batches, undo)
        stream = undo.enter_context(plain_stream(page_bytes, pages, batches))
        threads = ThreadedCopy(2)
        undo.callback(threads.close)
        data.store_all()
        undo.callback(data.clear)
        for engine in (data.writer, data.reader):
            data.check(engine, 0)
        into, turns = data.writer.l2, partial(next, itertools.cycle(range(batches)))

        def take_copy(copier: Callable[..., None]) -> Sample:
            slots = data.batch_slots(turns())
            return measure(lambda: copier(into, data.content, page_bytes, [(slot, slot) for slot in slots]), [])

        def take_stream() -> Sample:
            slots = data.batch_slots(turns())
            return measure(lambda: stream.receive(data.reader.l2, slots), [stream.pid])

        def take_get(engine: Engine) -> Sample:
            number = turns()
            batch = data.batch(engine, number)
            engine.exists(data.batch_names(number))  # as SGLang does before it fetches
            return measure(lambda: data.move(m.Get, engine, batch), pool.pids)

        takes: list[Take] = [
            partial(_take_put, data, turns),
            partial(take_get, data.writer),
            partial(take_get, data.reader),
            partial(take_copy, copy_pages),
            partial(take_copy, copy_and_hash_pages),
            partial(take_copy, threads),
            take_stream,
        ]
        for warm_up in takes:
            warm_up()
        calls = 2 if arguments.quick else max(IN_A_ROW, CALL_BYTES // batch_bytes)
        interleave(list(zip(series, takes, strict=True)), arguments.rounds, calls, in_a_row=IN_A_ROW)
        for engine in (data.writer, data.reader):
            data.check(engine, batches - 1)
    judgements = [
        Judgement("get same host / memcpy", page_bytes, ratio(near, copy), 0.7),
        Judgement("get over TCP / plain TCP stream", page_bytes, ratio(far, plain), 0.9),
        Judgement("put / memcpy", page_bytes, ratio(put, copy), None),
        Judgement("get same host / memcpy 2 threads", page_bytes, ratio(near, threaded), None),
        *(
            Judgement(f"engine CPU s/GB, {of.name}", page_bytes, _engine_cpu(of), ENGINE_CPU_AIM, at_most=True)
            for of in (put, near, far)
        ),
    ]
    return [Figure.of(of, page_bytes) for of in (put, near, far, copy, hashed, threaded, plain)], judgements


def _take_put(data: Pages, turns: Callable[[], int]) -> Sample:
    batch = data.batch(data.writer, turns(), data.new_names())
    sample = measure(lambda: data.move(m.Put, data.writer, batch), data.pool.pids)
    if data.puts % data.batches == 0:  # by then they fill the other half of the segment
        data.clear(puts_only=True)
    return sample


def _engine_cpu(series: Series) -> Spread:
    spread = series.cpu_per_gb(lambda sample: sample.engine_cpu)
    assert spread is not None
    return spread


def _bench_exists(pool: Pool, arguments: argparse.Namespace) -> tuple[list[Figure], list[Judgement]]:
    count = arguments.keys
    names = ["exists, all on this host", "exists, all on the other", "exists, none"]
    bare_names = ["Redis script, all there", "Redis script, none", "Redis PING"]
    local, remote, absent = asked = [Series(name, 0, count) for name in names]
    script, script_none, _ = bare = [Series(name, 0, 1 if "PING" in name else count) for name in bare_names]
    with ExitStack() as undo:
        data = Pages(pool, 4096, count, 1, undo)
        data.store_all()
        undo.callback(data.clear)
        redis = BareRedis(pool.redis_url)
        undo.callback(redis.close)
        missing = hashes("missing", count)
        keys = redis.object_keys()
        if len(keys) != count:
            raise RuntimeError(f"{len(keys)} objects are in Redis, not {count}")
        absent_keys = [f"{key}0" for key in keys]

        def ask(engine: Engine, page_hashes: list[str], expected: int) -> None:
            if sum(engine.exists(page_hashes)) != expected:
                raise RuntimeError("an existence query gave a wrong answer")

        takes: list[Take] = [
            lambda: measure(lambda: ask(data.writer, data.names, count), pool.pids),
            lambda: measure(lambda: ask(data.reader, data.names, count), pool.pids),
            lambda: measure(lambda: ask(data.reader, missing, 0), pool.pids),
            lambda: measure(lambda: redis.count(keys), []),
            lambda: measure(lambda: redis.count(absent_keys), []),
            lambda: measure(redis.ping, []),
        ]
        for warm_up in takes:
            warm_up()
        calls = 5 if arguments.quick else 60
        interleave(list(zip([*asked, *bare], takes, strict=True)), arguments.rounds, calls, in_a_row=IN_A_ROW)
    judgements = [
        Judgement(f"{of.name} / {to.name}", None, _inverse(ratio(of, to)), 2.0, at_most=True)
        for of, to in ((local, script), (remote, script), (absent, script_none))
    ]
    return [Figure.of(of, None) for of in (*asked, *bare)], judgements


def _inverse(spread: Spread) -> Spread:
    """Of throughputs the ratio of times."""
    return Spread(1 / spread.median, 1 / spread.high, 1 / spread.low)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
