"""Block tokens never collide, shapes keep what they promise, and the generated workload is the published one."""

from __future__ import annotations

import doctest
import importlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.multiturn import shape
from benchmarks.multiturn.generate import multiturn
from benchmarks.multiturn.ideal import contents
from benchmarks.multiturn.tokens import Vocabulary, word
from benchmarks.multiturn.workload import Blocks, Session, Turn, Workload
from hicache_mooncake.errors import ConfigError

ids = st.integers(0, 2**63)


@settings(max_examples=100, deadline=None)
@given(ids, ids, st.sampled_from([(3, 500), (1000, 30000), (0, 128000)]), st.integers(16, 64), st.integers(1, 200))
def test_equal_ids_are_equal_tokens_and_others_differ(
    one: int, other: int, vocabulary: tuple[int, int], size: int, length: int
) -> None:
    words = Vocabulary(*vocabulary)
    count = -(-length // size)
    tokens = words.ids((Blocks("s", (one,) * count, size, length),))
    assert len(tokens) == length and tokens.min() >= vocabulary[0] and tokens.max() < vocabulary[1]
    whole = words.ids((Blocks("s", (one,), size, size),))
    assert np.array_equal(tokens[:size], whole[:length]), "a cut block is the beginning of the whole one"
    assert np.array_equal(whole, words.ids((Blocks("s", (other,), size, size),))) == (one == other)
    assert not np.array_equal(whole, words.ids((Blocks("t", (one,), size, size),)))


def test_blocks_too_short_to_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="block tokens"):
        Vocabulary(3, 500).ids((Blocks("s", (1, 2), 4, 8),))
    with pytest.raises(ValueError, match="cannot hold"):
        Blocks("s", (1,), 16, 17)


def test_words_stand_for_one_token_each() -> None:
    assert len({word(token) for token in range(30_000)}) == 30_000


def test_the_published_workload() -> None:
    found = contents(multiturn())
    assert (found.requests, found.longest_prompt) == (200, 10 * 4096 + 9)
    for shared, unique in ((0.0, 20 * 10 * 4096), (0.5, 20 * 10 * 4096 - 19 * 2048)):
        assert contents(multiturn(shared=shared)).tokens_unique == unique
    with pytest.raises(ConfigError, match="clients"):
        multiturn(clients=0)


def trace(*lengths: int, output: int = 10) -> Workload:
    """One session whose prompts grow, in 16-token blocks."""
    turns = tuple(
        Turn(number, (Blocks("s", tuple(range(-(-length // 16))), 16, length),), output, at=float(number), think=2.0)
        for number, length in enumerate(lengths, 1)
    )
    return Workload("t", lambda: iter([Session("s", turns)]))


def test_prompts_are_cut_once_and_not_asked_again() -> None:
    workload = shape.cut(trace(32, 64, 200, 300), 100)
    (session,) = workload.sessions()
    assert [(turn.number, turn.known_tokens) for turn in session.turns] == [(1, 32), (2, 64), (3, 90)]
    assert workload.notes == Counter(
        {"prompts cut to the context": 1, "turns left out: nothing new within the context": 1}
    )
    (built,) = shape.cut(multiturn(1, 10, 100, 10), 450).sessions()
    assert len(built.turns) == 4, "prompt and answer of the fifth would not fit"


def test_time_load_and_token_scales() -> None:
    (session,) = shape.timed(trace(32, 64), 0.5).sessions()
    assert [(turn.at, turn.think) for turn in session.turns] == [(0.5, 1.0), (1.0, 1.0)]
    (session,) = shape.shrunk(trace(32, 70), 0.5).sessions()
    assert [turn.prompt[0] for turn in session.turns] == [
        Blocks("s", (0, 1), 8, 16),
        Blocks("s", (0, 1, 2, 3, 4), 8, 35),
    ]
    many = multiturn(200, 1, 64)
    half = {session.id for session in shape.loaded(many, 0.5).sessions()}
    assert 60 < len(half) < 140 and half <= {session.id for session in many.sessions()}
    twice = contents(shape.loaded(many, 2.0))
    assert (twice.requests, twice.tokens_unique) == (400, 400 * 64)
    assert [session.turns[0].at for session in shape.staggered(trace(32), 1.0).sessions()] == [1.0]
    assert contents(shape.limited(multiturn(5, 4, 64), requests=6)).requests == 6
    with pytest.raises(ConfigError, match="time scale"):
        shape.timed(many, 0)


@pytest.mark.parametrize("name", ["workload", "tokens", "provenance", "wording", "readers.threads"])
def test_examples_in_the_code_are_true(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(f"benchmarks.multiturn.{name}"))
    assert tried.attempted > 0 and not tried.failed
