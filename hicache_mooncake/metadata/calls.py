"""Calls to the shards of a directory: in pipelines over all of them at once, scripts by their digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import redis.exceptions as failures

from hicache_mooncake.metadata.link import Away, Command, Link
from hicache_mooncake.metadata.scripts import Script

CALLS_PER_WRITE = 8
"""Calls sent to a shard before the first reply is read: enough to hide the round trip, and buffers stay small."""

MAX_CALLS_PER_WRITE = 64


class Call(NamedTuple):
    """A command, or a script with its keys and arguments, in a slot."""

    slot: int
    command: Command
    script: Script | None = None

    def in_full(self) -> Command:
        """The command with the script's source in place of its digest."""
        assert self.script is not None
        return ("EVAL", self.script.source, *self.command[2:])


def run(script: Script, slot: int, keys: Sequence[str | bytes], arguments: Sequence[str | int]) -> Call:
    """A call of ``script``: by its digest, and in full where the server does not know it (new, restarted, SCRIPT
    FLUSH).
    """
    return Call(slot, ("EVALSHA", script.sha1, len(keys), *keys, *arguments), script)


def send(link: Link, calls: Sequence[Call], *, shards: int = 1) -> list[Any]:
    """The replies, in order; an :class:`Away` for a call whose server cannot be reached while others could.

    Raises :class:`Unavailable` when none could, or when a server refused a call.
    """
    replies: list[Any] = []
    step = min(CALLS_PER_WRITE * shards, MAX_CALLS_PER_WRITE)
    for start in range(0, len(calls), step):
        some = calls[start : start + step]
        answers = _exchange(link, some)
        unknown = [at for at, answer in enumerate(answers) if isinstance(answer, failures.NoScriptError)]
        if unknown:
            full = [Call(some[at].slot, some[at].in_full()) for at in unknown]
            for at, answer in zip(unknown, _exchange(link, full), strict=True):
                answers[at] = answer
        for answer in answers:
            if isinstance(answer, failures.RedisError) and not isinstance(answer, Away):
                raise link.unavailable(answer) from answer
        replies += answers
    return replies


def _exchange(link: Link, calls: Sequence[Call]) -> list[Any]:
    return link.call([call.command for call in calls], [call.slot for call in calls])


def by_shard(spread: Sequence[Sequence[int]], limit: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Positions shard by shard, at most ``limit`` at a time, the shards in turn so that all have work at once.

    >>> list(by_shard([range(3), range(3, 4)], 2))
    [(0, range(0, 2)), (1, range(3, 4)), (0, range(2, 3))]
    """
    for start in range(0, max(map(len, spread), default=0), limit):
        for shard, positions in enumerate(spread):
            if start < len(positions):
                yield shard, positions[start : start + limit]
