"""The compiled copying of batches. Optional: without it (no C compiler at installation) Python copies page by page.

What it brings: several threads really copy at once, because none needs the interpreter lock between two pages.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import xxhash

from hicache_mooncake.native.build import library as built_library

logger = logging.getLogger(__name__)

HOW_TO_BUILD = "python -m hicache_mooncake.native.build"

COPIED, LATE, REVOKED = 1, 2, 3
"""How a job ended."""

_JOB_WORDS = 6
_PIECE_WORDS = 3

_XXH3 = (
    "XXH3_64bits_withSeed",
    "XXH3_createState",
    "XXH3_freeState",
    "XXH3_64bits_reset_withSeed",
    "XXH3_64bits_update",
    "XXH3_64bits_digest",
)


class Jobs:
    """Copies to be made, done by any number of threads together, and then how they ended."""

    def __init__(self, keys: Sequence[str], pieces: Sequence[Sequence[int]]) -> None:
        """One page a key; its pieces, one after the other, are the addresses to copy to and from, and a length."""
        joined = "".join(keys).encode()
        lengths = list(map(len, keys))
        if len(joined) != sum(lengths):  # not plain ASCII
            lengths = [len(key.encode()) for key in keys]
        jobs: list[int] = []
        first = start = 0
        for of_page, length in zip(pieces, lengths, strict=True):
            count = len(of_page) // _PIECE_WORDS
            jobs += (count, first, start, length, 0, 0)
            first += count
            start += length
        self._keys = joined
        self._jobs = array("Q", jobs)
        self._pieces = array("Q", chain.from_iterable(pieces))
        self._next = ctypes.c_uint64(0)
        self.arguments = (
            self._jobs.buffer_info()[0],
            len(keys),
            self._pieces.buffer_info()[0],
            self._keys,
            ctypes.addressof(self._next),
        )

    @property
    def digests(self) -> list[int]:
        """Of each page the checksum of what lies there now, if it was copied."""
        return self._jobs[4::_JOB_WORDS].tolist()

    @property
    def outcomes(self) -> list[int]:
        """Of each page ``COPIED``, ``LATE`` or ``REVOKED``."""
        return self._jobs[5::_JOB_WORDS].tolist()


class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` or ``AttributeError`` when it, or what it needs of python-xxhash, cannot be loaded."""
        spec = importlib.util.find_spec("xxhash._xxhash")
        if spec is None or spec.origin is None:
            raise OSError("python-xxhash has no compiled module")
        hashing = ctypes.CDLL(spec.origin)
        self._copy = ctypes.CDLL(str(path)).hcm_copy
        word, address = ctypes.c_uint64, ctypes.c_void_p
        self._copy.argtypes = [address, word, address, ctypes.c_char_p, address, address, word, ctypes.c_int64, address]
        self._copy.restype = ctypes.c_int
        functions = [ctypes.cast(getattr(hashing, name), ctypes.c_void_p).value or 0 for name in _XXH3]
        self._hashing = (ctypes.c_void_p * len(functions))(*functions)
        self._loaded = hashing  # its functions are called for as long as we are

    def copy(self, jobs: Jobs, allowed: int, request: int, deadline: float) -> None:
        """Do jobs until none is left that nobody has taken: copies, and digests of what lies in the targets then.

        ``allowed`` is the address of a word that holds ``request`` for as long as the copying is wanted; ``deadline``
        is in ``time.monotonic()`` seconds. Lets go of the interpreter lock. Raises ``MemoryError``.
        """
        until = min(int(deadline * 1e9), (1 << 63) - 1)
        if self._copy(*jobs.arguments, allowed, request, until, self._hashing):
            raise MemoryError("no memory for the state of a checksum")


def load() -> Library | None:
    """The library if it is there, fits this machine and computes what python-xxhash computes; else None."""
    try:
        path = built_library()
        if not path.exists():
            return None
        loaded = Library(path)
        if _works(loaded):
            return loaded
        reason = "it computes something else than python-xxhash"
    except (OSError, AttributeError, MemoryError) as error:
        reason = str(error)
    logger.warning("compiled copying is not used: %s (to build it anew: %s)", reason, HOW_TO_BUILD)
    return None


def _works(library: Library) -> bool:
    source = ctypes.create_string_buffer(bytes(range(256)) * 4)
    target = ctypes.create_string_buffer(len(source))
    word = ctypes.c_uint64(7)
    start, to = ctypes.addressof(source), ctypes.addressof(target)
    jobs = Jobs(["a", "key"], [(to, start, 500), (to + 500, start + 500, 100, to + 600, start + 600, 200)])
    library.copy(jobs, ctypes.addressof(word), 7, float(1 << 32))
    seeds = [xxhash.xxh3_64_intdigest(key) for key in (b"a", b"key")]
    right = [
        xxhash.xxh3_64_intdigest(source.raw[:500], seeds[0]),
        xxhash.xxh3_64_intdigest(source.raw[500:800], seeds[1]),
    ]
    whole: bytes = target.raw[:800]
    return jobs.outcomes == [COPIED, COPIED] and jobs.digests == right and whole == source.raw[:800]


library = load()
"""None where Python has to copy."""
