"""Conversations as text: ShareGPT-style files, and the format of SGLang's ``--dataset-name agentic-trace``.

The text goes to the server as it is, with the roles written out; the server's own answers go into the next turns, as
in SGLang's benchmark. So the tokenizer and the lengths are the served model's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.multiturn.readers.arrays import array_items
from benchmarks.multiturn.readers.fields import Record, lines
from benchmarks.multiturn.workload import Session, Text, Turn

AGENTIC_ANSWER = 220
"""Output tokens a turn of an agentic trace, which has none: SGLang's default."""

_CHARACTERS_PER_TOKEN = 4
"""A recorded answer's text as output tokens: what English comes to with vocabularies of 32,000 to 150,000."""

_ANSWERS = ("gpt", "chatgpt", "bing", "bard", "assistant", "model")


def read_sharegpt(path: Path, notes: Counter[str]) -> Iterator[Session]:
    """A session a conversation that has a question and an answer: ``conversations`` of ``from`` and ``value``, or
    ``messages`` of ``role`` and ``content``.
    """
    for number, record in enumerate(_records(path), 1):
        name = "conversations" if "conversations" in record.content else "messages"
        turns: list[Turn] = []
        asked: list[tuple[str, str]] = []
        for at, content in enumerate(record.items(name)):
            message = Record(record.path, record.line, content, f"{name}[{at}].")
            role = message.text("from" if "from" in message.content else "role")
            text = _text(message, "value" if "value" in message.content else "content")
            if role not in _ANSWERS:
                asked.append((role, text))
            elif asked:
                tokens = max(1, len(text) // _CHARACTERS_PER_TOKEN)
                turns.append(_turn(len(turns) + 1, asked, tokens))
                asked = []
        if turns:
            yield Session(f"{path.stem}:{record.content.get('id', number)}#{number}", tuple(turns))
        else:
            notes["conversations without an answer dropped"] += 1


def read_sglang(path: Path, notes: Counter[str]) -> Iterator[Session]:
    """A session a conversation; a turn has its new messages only, and the answers are the server's."""
    for number, (line, conversation) in enumerate(array_items(path, "conversations"), 1):
        whole = Record(path, line, {"conversation": conversation}, f"conversations[{number - 1}].")
        turns: list[Turn] = []
        for at, content in enumerate(whole.items("conversation")):
            turn = Record(path, line, content, f"conversations[{number - 1}][{at}].")
            asked = []
            for place, said in enumerate(turn.items("messages") if turn.content.get("messages") is not None else []):
                message = Record(path, line, said, f"{turn.within}messages[{place}].")
                asked.append((message.text("role"), _text(message, "content")))
            if asked:
                turns.append(_turn(len(turns) + 1, asked, AGENTIC_ANSWER))
        if turns:
            yield Session(f"{path.stem}:{number}", tuple(turns))
        else:
            notes["conversations without messages dropped"] += 1


def _records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        first = file.read(1 << 12).lstrip()[:1]
    if first == b"[":
        for line, item in array_items(path):
            yield Record(path, line, item)
    else:
        yield from lines(path)


def _turn(number: int, asked: Sequence[tuple[str, str]], output_tokens: int) -> Turn:
    said = "".join(f"{_ROLES.get(role, role.capitalize())}: {text}\n" for role, text in asked)
    return Turn(
        number, (Text(f"{'' if number == 1 else chr(10)}{said}Assistant:"),), output_tokens, continues=number > 1
    )


_ROLES = {"human": "User", "user": "User", "gpt": "Assistant"}


def _text(message: Record, field: str) -> str:
    """Text, or a list of parts of which the text is taken."""
    value: Any = message.content.get(field)
    if isinstance(value, list):
        return "\n".join(part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str))
    return message.text(field, "")
