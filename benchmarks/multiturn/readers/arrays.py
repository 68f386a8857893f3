"""Items of a large JSON array, one at a time, without ever holding the whole of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from benchmarks.multiturn.readers.fields import MalformedTrace

_CHUNK = 1 << 20
_LARGEST = 1 << 28
"""Characters of one item at most: an array that is broken off must not be searched for its end for ever."""


class _Scanner:
    """JSON values, cut from a file piece by piece."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self.line = 1
        self._file = file
        self._text = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is no white space, or nothing at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self.line += self._text[self._at] == "\n"
                self._at += 1
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def take(self, expected: str) -> None:
        found = self.peek()
        if not found or found not in expected:
            what = " or ".join(repr(character) for character in expected)
            raise MalformedTrace(
                self.path, self.line, "", f"{what} was expected, not {found!r}" if found else "it ends early"
            )
        self._at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > _LARGEST or not self._more():
                    raise MalformedTrace(self.path, self.line, "", f"not JSON: {error.msg}") from None
                continue
            if end == len(self._text) and self._more():
                continue  # a number may go on
            self.line += self._text.count("\n", self._at, end)
            self._at = end
            return value

    def _more(self) -> bool:
        kept = self._text[self._at :]
        read = self._file.read(max(_CHUNK, len(kept)))
        self._text, self._at = kept + read, 0
        return bool(read)


def array_items(path: Path, key: str = "") -> Iterator[tuple[int, Any]]:
    """(line, item) of the array that the file is, or that is its object's ``key``.

    Raises :class:`MalformedTrace`.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        scanner = _Scanner(path, file)
        if scanner.peek() == "{" and key:
            scanner.take("{")
            while True:
                name = scanner.value()
                scanner.take(":")
                if name == key:
                    break
                scanner.value()
                if scanner.peek() != ",":
                    raise MalformedTrace(path, scanner.line, key, "the file has no such list")
                scanner.take(",")
        scanner.take("[")
        while scanner.peek() != "]":
            line = scanner.line
            yield line, scanner.value()
            if scanner.peek() != "]":
                scanner.take(",")
                if scanner.peek() == "]":
                    raise MalformedTrace(path, scanner.line, "", "a value was expected, not ']'")
