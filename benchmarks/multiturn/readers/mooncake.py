"""Mooncake's FAST'25 traces: JSONL of ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids`` of
512 tokens.

Equal ids mean equal prefixes; the last block may be shorter. The traces name no conversations: a request whose
blocks go on behind the last whole block of an earlier prompt, where that block was new then, is taken for its next
turn. https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.multiturn.readers.fields import lines
from benchmarks.multiturn.workload import Session, Turn

BLOCK = 512


def read(path: Path, notes: Counter[str]) -> Iterator[Session]:
    """A session a request, in the order of the file; turns of one conversation have its id."""
    begin: float | None = None
    ends: dict[int, tuple[str, int]] = {}  # the last whole block of a prompt that was not continued yet
    seen: set[int] = set()
    for record in lines(path):
        length = record.whole("input_length", 1)
        prompt = record.prompt("mooncake", BLOCK, length)
        stamp = record.number("timestamp") / 1000
        begin = stamp if begin is None else begin
        if stamp < begin:
            raise record.wrong("timestamp", "earlier than the first request")
        ids = prompt[0].ids[: length // BLOCK] if prompt[0].space == "mooncake" else ()
        session, turn = f"{path.stem}:{record.line}", 1
        for number in reversed(ids):
            if number in ends:
                session, turn = ends.pop(number)
                turn += 1
                break
        if ids and ids[-1] not in seen:
            ends[ids[-1]] = (session, turn)
        seen.update(ids)
        asked = Turn(turn, prompt, record.whole("output_length"), at=stamp - begin)
        yield Session(session, (asked,))
