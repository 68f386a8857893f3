"""Any workload of blocks as Mooncake JSONL, for tools that read nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.multiturn.tokens import Vocabulary
from benchmarks.multiturn.workload import Session, Text, Turn, Workload
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.radix_bridge import page_hashes

_WIDE = Vocabulary(0, 1 << 31)
"""Token ids of two digits a key: blocks of two tokens tell two keys apart."""


def write_mooncake(workload: Workload, out: Path, block: int = 512) -> int:
    """Write ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids`` of every turn; how many were written.

    Prompts are cut anew into blocks of ``block`` tokens, named by all tokens up to their end. Turns without a time get
    one by their think times. Raises :class:`ConfigError` for text, and for prompts that need a server's answers.
    """
    names: dict[str, int] = {}
    lines: list[tuple[float, str]] = []
    for session in workload.sessions():
        at = 0.0
        for turn in session.turns:
            at = turn.at if turn.at is not None else at + turn.think
            lines.append((at, json.dumps(_record(session, turn, at, block, names))))
    lines.sort(key=lambda line: line[0])
    out.write_text("".join(line + "\n" for _, line in lines))
    return len(lines)


def _record(session: Session, turn: Turn, at: float, block: int, names: dict[str, int]) -> dict[str, object]:
    if turn.continues or turn.after or session.after or any(isinstance(part, Text) for part in turn.prompt):
        allowed = "whole prompts of blocks: no text, answers or subagents in them"
        raise ConfigError("workload", session.request_id(turn), allowed, hint="--format mooncake, bailian or agentic")
    ids = _WIDE.ids(turn.prompt).tolist()
    hashes = page_hashes(ids, block)
    if len(ids) % block:
        tail = ids[len(hashes) * block :]
        hashes.append(f"{hashes[-1] if hashes else ''} {tail}")
    numbers = [names.setdefault(name, len(names)) for name in hashes]
    record = {"timestamp": round(at * 1000), "input_length": len(ids), "output_length": turn.output_tokens}
    return {**record, "hash_ids": numbers}
