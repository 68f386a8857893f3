"""What requests mean in tokens. Pages are counted once a page of the model, not once a rank, pool or part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache_mooncake.node.counters import Counters
from hicache_mooncake.protocol.messages import Keys, Status


def count(
    counters: Counters, op: str, groups: Sequence[tuple[Keys, Sequence[int]]], page_tokens: Mapping[str, int]
) -> None:
    """Add a request to ``<op>_tokens`` and ``<op>_tokens_ok``.

    ``groups``: the objects, part by part, and a status each. ``page_tokens``: tokens a page of those namespaces that
    the engine counts; others are not counted. A page is ``OK`` when all its parts are.
    """
    asked = ok = 0
    for keys, statuses in groups:
        tokens = page_tokens.get(keys.digest, 0)
        if tokens:
            width = len(keys.parts)
            asked += tokens * len(keys.hashes)
            whole = (
                statuses.count(Status.OK)
                if width == 1
                else sum(not any(statuses[at : at + width]) for at in range(0, len(statuses), width))
            )
            ok += tokens * whole
    if asked:
        counters.add(**{f"{op}_tokens": asked, f"{op}_tokens_ok": ok})
