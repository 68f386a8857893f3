"""Fields of trace records, checked: what is wrong is said with file, line and field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.multiturn.workload import Blocks
from hicache_mooncake.errors import HiCacheMooncakeError


class MalformedTrace(HiCacheMooncakeError):
    """A trace does not hold what its format promises. ``line`` counts from 1, ``field`` may be empty."""

    def __init__(self, path: Path, line: int, field: str, problem: str) -> None:
        where = f"{path}:{line}" + (f": field {field!r}" if field else "")
        super().__init__(f"{where}: {problem}", hint="is --format the trace's?")
        self.path = path
        self.line = line
        self.field = field


class Record:
    """One JSON object of a trace. ``within`` names it in errors, as in ``requests[3].hash_ids``."""

    def __init__(self, path: Path, line: int, content: Any, within: str = "") -> None:
        self.path = path
        self.line = line
        self.within = within
        if not isinstance(content, dict):
            raise MalformedTrace(path, line, within.removesuffix("."), f"an object was expected, not {_shown(content)}")
        self.content: dict[str, Any] = content

    def wrong(self, field: str, problem: str) -> MalformedTrace:
        return MalformedTrace(self.path, self.line, self.within + field, problem)

    def whole(self, field: str, least: int = 0) -> int:
        """A whole number."""
        value = self.content.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(field, f"a whole number of at least {least} was expected, not {self._given(field)}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Seconds or another number, not negative; ``default`` where the field is absent or null."""
        value = self.content.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self.wrong(field, f"a number of at least 0 was expected, not {self._given(field)}")
        return float(value)

    def text(self, field: str, default: str | None = None) -> str:
        value = self.content.get(field, default)
        if not isinstance(value, str):
            raise self.wrong(field, f"text was expected, not {self._given(field)}")
        return value

    def items(self, field: str) -> list[Any]:
        value = self.content.get(field)
        if not isinstance(value, list):
            raise self.wrong(field, f"a list was expected, not {self._given(field)}")
        return value

    def prompt(self, space: str, size: int, length: int, field: str = "hash_ids") -> tuple[Blocks, ...]:
        """The blocks of a prompt of ``length`` tokens, of ``size`` each.

        A last block may be cut; tokens that no hash covers (formats that hash full blocks only) are none's but this
        prompt's. Raises :class:`MalformedTrace` when there are more blocks than the prompt can have.
        """
        ids = self.items(field)
        for at, number in enumerate(ids):
            if isinstance(number, bool) or not isinstance(number, int):
                raise self.wrong(f"{field}[{at}]", f"a whole number was expected, not {_shown(number)}")
        if (len(ids) - 1) * size >= length:
            raise self.wrong(field, f"{len(ids)} blocks of {size} tokens for a prompt of {length}")
        covered = min(len(ids) * size, length)
        hashed = (Blocks(space, tuple(ids), size, covered),) if ids else ()
        rest = length - covered
        return (
            (*hashed, Blocks(f"{space}@{self.path.name}:{self.line}{self.within}", (0,), rest, rest))
            if rest
            else hashed
        )

    def _given(self, field: str) -> str:
        return _shown(self.content[field]) if field in self.content else "nothing"


def lines(path: Path) -> Iterator[Record]:
    """The records of a JSONL file, or of all ``*.jsonl`` files of a folder, one at a time. Empty lines are passed
    over."""
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield Record(file, number, decoded(file, number, line))


def decoded(path: Path, line: int, content: bytes) -> Any:
    """JSON that starts at a line of a file."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedTrace(path, line, "", f"not JSON: {error}") from None


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
