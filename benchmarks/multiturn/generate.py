"""The multi-turn workload of SGLang's and Mooncake's published HiCache figures, as blocks.

``clients`` sessions of ``rounds`` turns; each turn adds ``tokens`` new tokens to all that was said before, and gets
``output_tokens`` as its answer. With ``barrier`` no client begins a round before all have ended the one before.
``shared`` is the part of the first turn's tokens that is the same for all clients, as a system prompt is.

Published: 20 clients, 10 rounds of 4,096 tokens, answers of 1 token, 4 requests in flight, 16 a second, barrier, none
shared (Mooncake docs/source/performance, SSD offload). With those an unbounded cache hits k/(k+1) of round k, counted
from 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.multiturn.workload import Blocks, Session, Turn, Workload
from hicache_mooncake.errors import ConfigError


def multiturn(
    clients: int = 20,
    rounds: int = 10,
    tokens: int = 4096,
    output_tokens: int = 1,
    *,
    shared: float = 0.0,
    barrier: bool = True,
    think: float = 0.0,
    seed: int = 1,
) -> Workload:
    """The workload. ``think`` is in seconds. Raises :class:`ConfigError`."""
    for name, value in (("clients", clients), ("rounds", rounds), ("tokens", tokens)):
        if value < 1:
            raise ConfigError(name, value, "1 at least")
    if not 0 <= shared <= 1:
        raise ConfigError("shared", shared, "a share of the first turn's tokens, 0 to 1")
    system = round(tokens * shared)

    def session(client: int) -> Session:
        space = f"client {client} of {seed}"
        first = [Blocks(f"system of {seed}", (0,), system, system)] if system else []
        if tokens > system:
            first.append(Blocks(space, (0,), tokens - system, tokens - system))
        turns = [Turn(1, tuple(first), output_tokens)]
        for number in range(1, rounds):
            new = Blocks(space, (number,), tokens, tokens)
            turns.append(Turn(number + 1, (new,), output_tokens, continues=True, think=think))
        return Session(f"client {client}", tuple(turns))

    def sessions() -> Iterator[Session]:
        return map(session, range(clients))

    return Workload(
        f"multi-turn {clients} x {rounds} x {tokens}",
        sessions,
        barrier=barrier,
        requests=clients * rounds,
        settings={
            "clients": clients,
            "rounds": rounds,
            "tokens": tokens,
            "output_tokens": output_tokens,
            "shared": shared,
            "barrier": barrier,
            "think": think,
            "seed": seed,
        },
    )
