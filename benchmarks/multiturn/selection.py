"""Which workload a command line names, and how it is shaped: the arguments of every command that reads one."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.multiturn import shape
from benchmarks.multiturn.generate import multiturn
from benchmarks.multiturn.readers import FORMATS, read_workload
from benchmarks.multiturn.workload import Workload
from hicache_mooncake.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that :func:`workload_of` reads."""
    known = "; ".join(f"{name}: {found.about}" for name, found in FORMATS.items())
    which = parser.add_argument_group("workload", "a trace, or without one the published multi-turn benchmark")
    which.add_argument("--trace", type=Path, help="trace file, or a folder of them")
    which.add_argument("--format", choices=FORMATS, default="mooncake", help=known)
    which.add_argument("--clients", type=int, default=20, help="generated: conversations (default 20)")
    which.add_argument("--rounds", type=int, default=10, help="generated: turns of each (default 10)")
    which.add_argument("--tokens", type=int, default=4096, help="generated: new tokens a turn (default 4096)")
    which.add_argument("--shared", type=float, default=0.0, help="generated: share of turn 1 that all have in common")
    which.add_argument("--no-barrier", action="store_true", help="generated: rounds do not wait for each other")
    fit = parser.add_argument_group("made to fit")
    fit.add_argument(
        "--context", type=int, default=0, help="cut prompts to the context that the server serves, in tokens"
    )
    fit.add_argument("--time-scale", type=float, default=1.0, help="arrivals and think times this many times as long")
    fit.add_argument("--load-scale", type=float, default=1.0, help="this many times as many sessions")
    fit.add_argument("--token-scale", type=float, default=1.0, help="prompts and answers this many times as long")
    fit.add_argument(
        "--session-rate", type=float, default=0.0, help="sessions begin this many a second, not all at once"
    )
    fit.add_argument("--sessions", type=int, default=0, help="only the first sessions")
    fit.add_argument("--requests", type=int, default=0, help="only the first requests")
    fit.add_argument("--seconds", type=float, default=0.0, help="only what arrives in the first seconds")
    fit.add_argument(
        "--quick", action="store_true", help="a minute's worth: 4 x 4 x 256 tokens, or 40 requests of a trace"
    )


def workload_of(given: argparse.Namespace, *, grouped: bool) -> Workload:
    """The workload; ``grouped`` joins the requests of a timed trace into sessions, for a closed loop.

    Raises ``ConfigError``.
    """
    if given.trace is None:
        size = (4, 4, 256) if given.quick else (given.clients, given.rounds, given.tokens)
        made = multiturn(*size, shared=given.shared, barrier=not given.no_barrier)
    else:
        made = read_workload(given.format, given.trace)
        if given.quick and not given.requests:
            given.requests = 40
    if given.token_scale != 1:
        made = shape.shrunk(made, given.token_scale)
    if given.context:
        made = shape.cut(made, given.context)
    if given.load_scale != 1:
        made = shape.loaded(made, given.load_scale)
    if given.session_rate:
        made = shape.staggered(made, given.session_rate)
    if given.time_scale != 1:
        made = shape.timed(made, given.time_scale)
    if given.sessions or given.requests or given.seconds:
        made = shape.limited(made, sessions=given.sessions, requests=given.requests, seconds=given.seconds)
    if grouped and given.trace is not None and FORMATS[given.format].timed:
        made = shape.grouped(made)
    return made


def vocabulary(text: str) -> tuple[int, int]:
    """``1000:30000`` as a range of token ids."""
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit()):
        raise ConfigError("vocabulary", text, "first:end, two token ids")
    return int(first), int(end)
