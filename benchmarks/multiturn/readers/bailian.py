"""Alibaba's anonymised Bailian traces: JSONL with ``parent_chat_id``, seconds, and hashes of 16-token blocks.

https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.multiturn.readers.fields import lines
from benchmarks.multiturn.readers.threads import Threads
from benchmarks.multiturn.workload import Session, Turn

BLOCK = 16


def read(path: Path, notes: Counter[str]) -> Iterator[Session]:
    """A session a request, in the order of the file; requests of one chat have the id of its first."""
    threads = Threads()
    begin: float | None = None
    for record in lines(path):
        stamp = record.number("timestamp")
        begin = stamp if begin is None else begin
        if stamp < begin:
            raise record.wrong("timestamp", "earlier than the first request")
        prompt = record.prompt("bailian", BLOCK, record.whole("input_length", 1))
        parent = record.whole("parent_chat_id", -1)
        session, turn = threads.place(f"chat {record.whole('chat_id')}", f"chat {parent}" if parent >= 0 else None)
        if turn == 1 and record.content.get("turn"):
            turn = record.whole("turn", 1)  # its parent came before the trace began
            if turn > 1:
                notes["chats that began before the trace"] += 1
        yield Session(session, (Turn(turn, prompt, record.whole("output_length"), at=stamp - begin),))
