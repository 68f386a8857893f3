"""Agentic coding sessions as kv-cache-tester records them: one JSON file a session, think times, subagents, 64-token
blocks.

A request has ``t`` (seconds from the session's begin), ``in``, ``out``, ``hash_ids`` (of whole blocks only), and
where they are known ``api_time`` and ``think_time``. ``type`` ``subagent`` is no request but a nested list of them,
whose ``t`` counts from its own; the agent goes on when all its subagents are done. Hash ids are local to a trace,
unless ``hash_id_scope`` says ``global``, or ``per_context`` for each agent its own.
https://github.com/callanjfox/kv-cache-tester
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.multiturn.readers.fields import Record, decoded
from benchmarks.multiturn.workload import Session, Turn

_TELLING = 3
"""Prompts that two traces must have in common to be the same session: a first prompt alone may be a coincidence of
sizes."""


def read(path: Path, notes: Counter[str]) -> Iterator[Session]:
    """A session a file, in the order of their names. A recording of a session that was read already, whole or in
    part, is dropped and noted: copies would be hits that no user makes.
    """
    known: set[bytes] = set()
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        trace = Record(file, 1, decoded(file, 1, file.read_bytes()))
        marks = list(_marks(trace))
        if marks and (marks[-1] in known or any(mark in known for mark in marks[_TELLING - 1 :])):
            notes["duplicate sessions dropped"] += 1
            continue
        known.update(marks[_TELLING - 1 :] or marks[-1:])
        yield _session(trace)


def _marks(trace: Record) -> Iterator[bytes]:
    """A digest of all prompts up to each one."""
    digest = hashlib.blake2b(digest_size=16)
    for content in trace.items("requests"):
        if isinstance(content, dict) and content.get("type") != "subagent":
            digest.update(repr((content.get("in"), content.get("hash_ids"))).encode())
            yield digest.digest()


def _session(trace: Record) -> Session:
    size = trace.whole("block_size", 1) if "block_size" in trace.content else 64
    scope = trace.text("hash_id_scope", "local")
    if scope not in ("local", "global", "per_context"):
        raise trace.wrong("hash_id_scope", f"local, global or per_context was expected, not {scope!r}")
    return _agent(trace, trace.text("id", trace.path.stem), "", size, scope, 0.0)


def _agent(trace: Record, name: str, parent: str, size: int, scope: str, begin: float) -> Session:
    """The session of an agent (or subagent) whose times count from ``begin``."""
    root = name.partition(">")[0]
    space = {"global": "agentic", "local": f"agentic {root}", "per_context": f"agentic {name}"}[scope]
    turns: list[Turn] = []
    after: list[Session] = []
    last: Record | None = None
    for at, content in enumerate(trace.items("requests")):
        request = Record(trace.path, trace.line, content, f"{trace.within}requests[{at}].")
        if request.content.get("type") == "subagent":
            after.append(_agent(request, f"{name}>{at}", name, size, scope, begin + request.number("t", 0.0)))
            continue
        prompt = request.prompt(space, size, request.whole("in", 1))
        turns.append(
            Turn(
                len(turns) + 1,
                prompt,
                request.whole("out"),
                at=begin + request.number("t"),
                think=_think(request, last),
                after=tuple(after),
            )
        )
        after.clear()
        last = request
    return Session(name, tuple(turns), parent, tuple(after))


def _think(request: Record, last: Record | None) -> float:
    """Seconds between the answer before and this request: as recorded, or what was between them."""
    if request.content.get("think_time") is not None:
        return request.number("think_time")
    if last is None:
        return 0.0
    return max(0.0, request.number("t") - last.number("t") - last.number("api_time", 0.0))
