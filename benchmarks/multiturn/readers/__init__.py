"""Traces as workloads: one module a format, each a function that reads a path lazily and yields sessions.

``FORMATS`` names them. A record that does not fit its format raises :class:`~.fields.MalformedTrace` with file, line
and field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.multiturn.readers import agentic, bailian, conversations, mooncake
from benchmarks.multiturn.workload import Session, Workload
from hicache_mooncake.errors import ConfigError

__all__ = ["FORMATS", "Format", "read_workload"]

Reader = Callable[[Path, "Counter[str]"], Iterator[Session]]


@dataclass(frozen=True)
class Format:
    """A trace format: how to read it, whether it has timestamps, and in one line what it is."""

    read: Reader
    timed: bool
    about: str


FORMATS = {
    "mooncake": Format(mooncake.read, True, "Mooncake FAST'25 JSONL: timestamps, hashes of 512-token blocks"),
    "agentic": Format(
        agentic.read, True, "agentic coding sessions (kv-cache-tester): a JSON file each, 64-token blocks"
    ),
    "bailian": Format(bailian.read, True, "Qwen-Bailian JSONL: timestamps, 16-token blocks, parent_chat_id"),
    "sharegpt": Format(conversations.read_sharegpt, False, "ShareGPT-style text, JSON array or JSONL"),
    "sglang": Format(conversations.read_sglang, False, "SGLang's --dataset-name agentic-trace, JSON, text"),
}


def read_workload(name: str, path: Path) -> Workload:
    """A workload of the trace at ``path`` (a file, or a folder of them) in the format ``name``.

    Raises :class:`ConfigError` for an unknown format or a path that is not there; a malformed record raises later,
    when the workload is read.
    """
    if name not in FORMATS:
        raise ConfigError("format", name, f"one of {', '.join(FORMATS)}")
    if not path.exists():
        raise ConfigError("trace", str(path), "a file or folder that exists")
    notes: Counter[str] = Counter()

    def sessions() -> Iterator[Session]:
        notes.clear()
        return FORMATS[name].read(path, notes)

    return Workload(path.stem, sessions, settings={"format": name, "trace": path.name}, notes=notes)
