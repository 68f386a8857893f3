"""Block hashes as token ids: the same hash gives the same tokens in every run and process, different ones never the
same.

A block's 64-bit key mixes its hash id and its space by bijections, so two ids of one space have two keys; two spaces
meet with the odds of a 64-bit digest. The first tokens of a block are the digits of its key in base ``vocabulary
size``, so two keys give two blocks; the others are drawn from the key. So a cache of any page size up to the block's
finds exactly the prefixes that the trace's hashes tell of.

>>> vocabulary = Vocabulary(1000, 30000)
>>> first = vocabulary.ids((Blocks("t", (1, 2), 16, 32),))
>>> first[:16].tolist() == vocabulary.ids((Blocks("t", (1, 9), 16, 32),))[:16].tolist()
True
>>> first[16:].tolist() == vocabulary.ids((Blocks("t", (1, 9), 16, 32),))[16:].tolist()
False
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.multiturn.workload import Blocks, Part, Text
from hicache_mooncake.errors import ConfigError

Ids = NDArray[np.uint32]

_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]


class Vocabulary:
    """The token ids that blocks may become: ``first`` up to, not including, ``end``. Leave out special tokens.

    ``digits`` is how many tokens hold a block's key: shorter blocks could collide and are refused.
    """

    def __init__(self, first: int, end: int) -> None:
        if not 0 <= first < end - 1:
            raise ConfigError("vocabulary", (first, end), "two token ids at least, first:end with 0 <= first < end - 1")
        self.first = first
        self.size = end - first
        self.digits = 1
        while self.size**self.digits < 1 << 64:
            self.digits += 1

    def ids(self, parts: Iterable[Part]) -> Ids:
        """The tokens of block parts, one behind the other. Raises :class:`ConfigError` when blocks are too short."""
        rendered = []
        for part in parts:
            if isinstance(part, Text):
                raise ConfigError("form", "ids", "text, for a workload that is text", hint="--form text")
            rendered.append(self._of(part))
        return np.concatenate(rendered) if rendered else np.empty(0, np.uint32)

    def text(self, parts: Iterable[Part]) -> str:
        """The same prompt as words, one a token, for servers that take no ids. They count its tokens in their own
        way."""
        return "".join(
            part.text if isinstance(part, Text) else "".join(" " + word(token) for token in self._of(part).tolist())
            for part in parts
        )

    def _of(self, blocks: Blocks) -> Ids:
        size = blocks.size
        if size < self.digits and len(blocks.ids) > 1:
            allowed = f"at least {self.digits} with {self.size} token ids, or blocks could have the same tokens"
            raise ConfigError("block tokens", size, allowed, hint="a larger --token-scale or --vocabulary")
        with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
            ids = np.array([number & _MASK for number in blocks.ids], np.uint64)
            keys = _mix(_mix(ids) ^ np.uint64(_space_key(blocks.space)))[:, None]
            tokens = _mix(keys + np.arange(1, size + 1, dtype=np.uint64)[None, :] * _GOLDEN) % np.uint64(self.size)
            left = keys[:, 0]
            for place in range(min(self.digits, size)):
                tokens[:, place] = left % np.uint64(self.size)
                left //= np.uint64(self.size)
        flat: Ids = (tokens.reshape(-1)[: blocks.length] + np.uint64(self.first)).astype(np.uint32)
        return flat


def word(token: int) -> str:
    """A word that stands for one token id and no other.

    >>> word(0), word(99), word(100)
    ('ba', 'zu', 'beba')
    """
    written = ""
    while True:
        token, digit = divmod(token, len(_SYLLABLES))
        written = _SYLLABLES[digit] + written
        if not token:
            return written


_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words that lets every bit depend on every other (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


@lru_cache(maxsize=4096)
def _space_key(space: str) -> int:
    return int.from_bytes(hashlib.blake2b(space.encode(), digest_size=8).digest(), "little")
