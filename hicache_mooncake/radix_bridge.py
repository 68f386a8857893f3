"""From SGLang's radix cache to object keys: page hashes, namespaces, parts. Pure; everything that names a page is here.

A **page hash** is SGLang's own: a SHA-256 chain over pages of tokens (``sglang/srt/mem_cache/utils.py``). A
**namespace** is everything that must match for the bytes of two equal page hashes to be interchangeable. A **part**
says which shard of the page an object holds. Together they are the **object key**
``<namespace digest>:<page hash>:<part>``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SCHEMA = "1"
"""Version of what a stored page's bytes mean. A change of checksum, framing or extent order is a new schema."""

DIGEST_LENGTH = 16
"""Hex digits of a namespace digest: 64 bits tell apart more deployments than will ever share a pool."""

_PLAIN_HASH = re.compile(r"[0-9A-Za-z._+/=-]+")


def namespace_seed(extra_key: str | None = None, cache_salt: str | None = None) -> str | None:
    """The page hash that stands before the first page: None for plain requests.

    ``extra_key`` carries a LoRA adapter's id, ``cache_salt`` a tenant's salt. Same rule as SGLang 0.5.23's
    ``storage_namespace_seed``: presence and byte length are framed, so joined parts cannot alias. An empty salt is
    none, as in SGLang's ``RadixKey``.
    """
    cache_salt = cache_salt or None
    if extra_key is None and cache_salt is None:
        return None
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for text in (extra_key, cache_salt):
        if text is None:
            digest.update(b"\x00")
        else:
            encoded = text.encode()
            digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def page_hashes(tokens: Sequence[int], page_size: int, *, prior: str | None = None, bigram: bool = False) -> list[str]:
    """SGLang's hash of every whole page of ``tokens``; a partial last page has none.

    ``prior`` is the hash of the page before the first one, or :func:`namespace_seed`'s result. ``bigram`` is the form
    of EAGLE's cache: a page of n units covers n + 1 tokens, unit i being the pair (i, i + 1). Raises ``ValueError``
    for a page size below 1 or a token id that is no non-negative int64.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}, must be at least 1")
    try:
        array = np.asarray(tokens, dtype=np.int64)
    except OverflowError as error:
        raise ValueError("token ids must be non-negative int64") from error
    if array.size and int(array.min()) < 0:
        raise ValueError("token ids must be non-negative int64")
    units = np.stack((array[:-1], array[1:]), axis=1) if bigram else array.reshape(-1, 1)
    previous = bytes.fromhex(prior) if prior else b""
    hashes: list[str] = []
    for start in range(0, len(units) // page_size * page_size, page_size):
        previous = hashlib.sha256(previous + _encode_page(units[start : start + page_size])).digest()
        hashes.append(previous.hex())
    return hashes


def _encode_page(units: npt.NDArray[np.int64]) -> bytes:
    """Little-endian u32 each; a page with any wider token is a tag and u64 each (an odd length, so never the same)."""
    if int(units.max()) <= 0xFFFFFFFF:
        return units.astype("<u4").tobytes()
    return b"\xff" + units.astype("<u8").tobytes()


@dataclass(frozen=True)
class Namespace:
    """Everything that makes stored bytes interchangeable, as readable fields.

    Two deployments share pages exactly when all their fields are equal; :attr:`digest` is what enters the keys, the
    fields themselves are kept in Redis for people to read.
    """

    fields: Mapping[str, str]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        framed = hashlib.sha256()
        for name, value in sorted(self.fields.items()):
            for text in (name.encode(), value.encode()):
                framed.update(len(text).to_bytes(8, "little") + text)
        object.__setattr__(self, "digest", framed.hexdigest()[:DIGEST_LENGTH])

    @classmethod
    def describe(cls, **fields: object) -> Namespace:
        """A namespace of this schema from keyword fields; values are written as ``str``."""
        return cls({"schema": SCHEMA, **{name: str(value) for name, value in fields.items()}})


def object_keys(digest: str, hashes: Iterable[str], parts: Sequence[str]) -> list[str]:
    """Object keys page by page: all parts of the first page, then all of the second, and so on."""
    if len(parts) == 1:
        tail = f":{parts[0]}"
        return [f"{digest}:{page_hash}{tail}" for page_hash in hashes]
    return [f"{digest}:{page_hash}:{part}" for page_hash in hashes for part in parts]


def split_object_key(key: str) -> tuple[str, str, str]:
    """``(namespace digest, page hash, part)`` of an object key. Raises ``ValueError`` when it is none."""
    digest, _, rest = key.partition(":")
    page_hash, _, part = rest.partition(":")
    if len(digest) != DIGEST_LENGTH or not page_hash or not part or ":" in part:
        raise ValueError(f"{key!r} is not an object key (digest:page hash:part)")
    return digest, page_hash, part


def printable_hash(page_hash: str) -> str:
    """The page hash as it stands in an object key.

    SGLang's hex hashes stand as they are. Any other string is an opaque name that may hold separators, so it is
    written as ``x`` and its UTF-8 bytes in hex: different strings stay different, and a plain hash never begins
    with ``x`` (hex digits only reach ``f``).
    """
    if len(page_hash) == 64 and _PLAIN_HASH.fullmatch(page_hash) and not page_hash.startswith("x"):
        return page_hash
    return "x" + page_hash.encode("utf-8", "surrogatepass").hex()


def printable_hashes(page_hashes: Sequence[str]) -> Sequence[str]:
    """:func:`printable_hash` of each: a batch of plain hashes is seen to be one by a single look at all of it."""
    joined = "".join(page_hashes)
    if "x" not in joined and set(map(len, page_hashes)) == {64} and _PLAIN_HASH.fullmatch(joined):
        return page_hashes
    return [printable_hash(page_hash) for page_hash in page_hashes]


@dataclass(frozen=True)
class Shards:
    """Which parts of a page this rank holds, and the fields of its namespace that say how pages were cut.

    ``parts`` is one name per object of a page, in the order of the page's buffers.
    """

    parts: tuple[str, ...]
    fields: Mapping[str, str]


def shards_of_rank(
    *,
    replicated: bool,
    tp_rank: int,
    tp_size: int,
    pp_rank: int = 0,
    pp_size: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
    dcp_rank: int = 0,
    dcp_size: int = 1,
    head_shards: int = 0,
) -> Shards:
    """The parts a rank reads and writes.

    ``replicated``: every tensor-parallel rank holds the same bytes (MLA), so the rank is not part of the name.
    ``head_shards``: KV heads are cut into this many shards whatever the TP size (SGLang's ``tp_lcm_size`` with layout
    ``page_head``), so that engines with different TP sizes read each other's pages; 0 when pages are cut by rank.
    """
    tail = ""
    if dcp_size > 1:
        tail += f".dcp{dcp_rank}"
    if pp_size > 1:
        tail += f".pp{pp_rank}"
    if cp_size > 1:
        tail += f".cp{cp_rank}"
    fields = {"pp": str(pp_size), "cp": str(cp_size), "dcp": str(dcp_size)}
    if replicated:
        return Shards(("all" + tail,), {**fields, "tp": "replicated" if dcp_size == 1 else str(tp_size)})
    if head_shards:
        if head_shards % tp_size:
            raise ValueError(f"head shards ({head_shards}) must be a multiple of the TP size ({tp_size})")
        per_rank = head_shards // tp_size
        first = tp_rank * per_rank
        parts = tuple(f"h{shard}{tail}" for shard in range(first, first + per_rank))
        return Shards(parts, {**fields, "tp": f"heads/{head_shards}"})
    return Shards((f"tp{tp_rank}{tail}",), {**fields, "tp": str(tp_size)})
