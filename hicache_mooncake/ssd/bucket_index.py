"""The index file of a bucket: an Arrow IPC file that operators open with pyarrow, and nothing in it is trusted.

Columns: ``key`` (string), ``size``, ``checksum``, ``offset`` (uint64), a row an object, in the order they lie in the
data file. The data file's last block, the seal, has the index file's length and checksum: only an index that matches
is parsed, so a damaged one can do no harm, and the bucket's rows are taken from its batches instead.
"""

from __future__ import annotations

import importlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import xxhash

from hicache_mooncake.errors import ConfigError
from hicache_mooncake.ssd.frames import VERSION, Frame, Kind, encode

_SEAL: Final = struct.Struct("<QQQ")


class BucketRows:
    """The objects of one bucket as columns: 24 bytes each and the key, nothing for the garbage collector to walk."""

    __slots__ = ("checksums", "keys", "offsets", "sizes")

    def __init__(self, keys: list[str], sizes: array[int], checksums: array[int], offsets: array[int]) -> None:
        self.keys = keys
        self.sizes = sizes
        self.checksums = checksums
        self.offsets = offsets

    @classmethod
    def empty(cls) -> BucketRows:
        return cls([], array("Q"), array("Q"), array("Q"))

    def __len__(self) -> int:
        return len(self.keys)

    def append(self, key: str, size: int, checksum: int, offset: int) -> None:
        self.keys.append(key)
        self.sizes.append(size)
        self.checksums.append(checksum)
        self.offsets.append(offset)

    def take(self, rows: Sequence[int]) -> BucketRows:
        """Some of the rows."""
        return BucketRows(
            [self.keys[row] for row in rows],
            *(array("Q", (column[row] for row in rows)) for column in (self.sizes, self.checksums, self.offsets)),
        )


def arrow() -> Any:
    """pyarrow, imported when it is first needed. Raises ``ConfigError`` when it is not installed."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(
            "ssd_store", "bucket", f"it needs pyarrow ({error})", hint="pip install 'hicache-mooncake[ssd]'"
        ) from error


def encode_index(rows: BucketRows, *, bucket: int, pool: str, owner: bytes) -> bytes:
    """The bytes of the index file."""
    pa = arrow()
    ipc = importlib.import_module("pyarrow.ipc")
    schema = pa.schema(
        [("key", pa.string()), ("size", pa.uint64()), ("checksum", pa.uint64()), ("offset", pa.uint64())],
        metadata={
            "hicache_mooncake": "bucket index",
            "version": str(VERSION),
            "bucket": f"{bucket:016x}",
            "pool": pool,
            "owner": owner.hex(),
            "checksum": "xxh3-64 of the bytes, seeded by xxh3-64 of the key",
        },
    )
    columns = [pa.array(rows.keys, pa.string())]
    columns += [pa.array(np.frombuffer(column, np.uint64)) for column in (rows.sizes, rows.checksums, rows.offsets)]
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode_index(content: bytes) -> BucketRows:
    """The rows of an index file whose checksum was right. Raises ``ValueError`` for what cannot be one."""
    pa = arrow()
    ipc = importlib.import_module("pyarrow.ipc")
    try:
        table = ipc.open_file(pa.BufferReader(content)).read_all()
        table.validate(full=True)
        keys = table["key"].to_pylist()
        columns = []
        for name in ("size", "checksum", "offset"):
            column = array("Q")
            column.frombytes(table[name].to_numpy().astype(np.uint64, copy=False).tobytes())
            columns.append(column)
    except (pa.ArrowException, KeyError, TypeError) as error:
        raise ValueError(f"no bucket index: {error}") from error
    return BucketRows(keys, *columns)


def seal_frame(index: bytes, *, rows: int, bucket: int, owner: bytes, place: int) -> Frame:
    """The last block of a bucket's data file."""
    payload = _SEAL.pack(len(index), xxhash.xxh3_64_intdigest(index), rows)
    return Frame(Kind.SEAL, owner, bucket, place, 0, payload)


def matches_seal(index: bytes, seal: Frame) -> bool:
    """Whether this is the index that the bucket was sealed with."""
    length, digest, _ = _SEAL.unpack(seal.payload)
    return bool(length == len(index) and digest == xxhash.xxh3_64_intdigest(index))


def batch_frame(payload: bytes, *, rows: int, bucket: int, owner: bytes, place: int) -> bytes:
    """The bytes before a batch of objects in a bucket's data file."""
    return encode(Frame(Kind.BATCH, owner, bucket, place, rows, payload))
