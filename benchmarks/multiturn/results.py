"""What came back from a replay, a row a request, as a Parquet file; and what it was measured with, in the file's
metadata.

The columns are the fields of :class:`Row`, in order. The metadata has one key, ``hicache_mooncake.replay``, a JSON
object: ``schema`` (:data:`SCHEMA`), ``workload``, ``configuration``, ``clock``, ``started`` (Unix seconds),
``seconds``, ``options``, ``endpoint``, ``server`` (what it says of itself), ``metrics`` (counters of the server, by
which they grew), ``versions``, ``machine``, and whatever the caller added.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from hicache_mooncake.errors import ConfigError

SCHEMA = 1

KEY = b"hicache_mooncake.replay"

_ROWS_A_GROUP = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times are seconds since the run began, durations seconds; None: not known.

    ``due_s`` is when the workload wanted it, ``sent_s`` when it went out: between them it waited for the replay's
    own bound on requests in flight. ``ttft_s`` counts from ``due_s`` in an open loop (or a slow server would be
    asked less, and look faster: coordinated omission), from ``sent_s`` in a closed one, where nobody wanted it
    earlier; the last try counts, and time lost on earlier ones is in it. ``tbt_s`` is the mean of the longest tenth
    of the gaps between tokens (as Mooncake counts it). ``cached_*`` are prompt tokens by where their KV was found,
    as the server tells them; ``storage_wait_s``, ``queue_s`` and ``prefill_s`` are the server's own times, where it
    gives them: waiting for L3, then for its turn, and computing. ``answer`` is a digest of the output's tokens (or
    text), to see that two runs agree.
    """

    request_id: str
    session_id: str
    parent_id: str
    turn: int
    due_s: float
    sent_s: float
    first_token_s: float | None
    done_s: float
    ttft_s: float | None
    tbt_s: float | None
    tbt_mean_s: float | None
    tbt_max_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_known: bool
    cached_device: int
    cached_host: int
    cached_storage: int
    storage_wait_s: float | None
    queue_s: float | None
    prefill_s: float | None
    retries: int
    error: str
    answer: str

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.cached_device + self.cached_host + self.cached_storage


_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def columns() -> pa.Schema:
    """The Parquet schema: a column a field of :class:`Row`, nullable where the field may be None."""
    hints = get_type_hints(Row)
    found = []
    for field in fields(Row):
        hint = hints[field.name]
        nullable = isinstance(hint, types.UnionType)
        found.append(pa.field(field.name, _TYPES[get_args(hint)[0] if nullable else hint], nullable=nullable))
    return pa.schema(found)


class Writer:
    """Rows into a file, some at a time. The file appears under its name when it is whole: until then it is
    ``NAME.part``.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.rows = 0
        self._part = path.with_name(path.name + ".part")
        self._schema = columns()
        self._writer = pq.ParquetWriter(self._part, self._schema, compression="zstd")
        self._waiting: list[Row] = []

    def add(self, row: Row) -> None:
        self._waiting.append(row)
        self.rows += 1
        if len(self._waiting) >= _ROWS_A_GROUP:
            self._flush()

    def close(self, metadata: Mapping[str, Any]) -> None:
        """Write the rest and the metadata, and give the file its name."""
        try:
            self._flush()
            content = json.dumps({"schema": SCHEMA, **metadata}, default=str)
            self._writer.add_key_value_metadata({KEY.decode(): content})
        finally:
            self._writer.close()
        os.replace(self._part, self.path)

    def abandon(self) -> None:
        """Leave no file behind."""
        self._writer.close()
        self._part.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._waiting:
            names = self._schema.names
            content = {name: [getattr(row, name) for row in self._waiting] for name in names}
            self._writer.write_table(pa.table(content, schema=self._schema))
            self._waiting.clear()


@dataclass(frozen=True)
class Run:
    """A replay as it was written down. ``rows`` are in the order in which they were due."""

    path: Path
    rows: tuple[Row, ...]
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The configuration, or the file's name where none was given."""
        return str(self.metadata.get("configuration") or self.path.stem)

    @property
    def metrics(self) -> dict[str, float]:
        """By how much the server's counters grew; empty where it has none."""
        return dict(self.metadata.get("metrics") or {})

    @property
    def answered(self) -> list[Row]:
        """Rows of requests that were answered to the end."""
        return [row for row in self.rows if not row.error]


def read_run(path: Path) -> Run:
    """Read a run. Raises :class:`ConfigError` when ``path`` is no file of a replay, or of a newer one."""
    try:
        with pq.ParquetFile(path) as file:
            found = (file.metadata.metadata or {}).get(KEY)
            table = file.read()
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError("run", str(path), f"a Parquet file of a replay: {error}") from None
    metadata = json.loads(found) if found else {}
    if metadata.get("schema") != SCHEMA:
        what = f"schema {metadata['schema']}" if "schema" in metadata else "no replay's metadata"
        raise ConfigError("run", str(path), f"a replay's file of schema {SCHEMA}; this one has {what}")
    missing = set(columns().names) - set(table.schema.names)
    if missing:
        raise ConfigError("run", str(path), f"a file with the columns {sorted(missing)}")
    rows = [Row(**row) for row in table.select(columns().names).to_pylist()]
    return Run(path, tuple(sorted(rows, key=lambda row: (row.due_s, row.request_id))), metadata)
