"""What goes to a server and comes back, without any I/O: the two streaming APIs, and server-sent events.

``sglang`` is SGLang's own ``POST /generate``; it says most: tokens, cached tokens by tier, how long it waited and
computed. ``openai`` is ``POST /v1/completions`` of any server; SGLang adds the tiers where it is asked to, others
tell the sum at best.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Api = Literal["sglang", "openai"]

PATHS: dict[Api, str] = {"sglang": "/generate", "openai": "/v1/completions"}

_LONGEST_EVENT = 1 << 26
"""Bytes of one event at most: SGLang repeats all tokens so far in each, so a long answer needs some hundred kB."""


class Refused(Exception):
    """The server answered with an error. ``again``: another try may fare better."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request carries: token ids, or text where ``ids`` is None."""

    ids: Sequence[int] | None
    text: str = ""


def body(api: Api, model: str, prompt: Prompt, output_tokens: int) -> bytes:
    """The request's body: greedy, exactly ``output_tokens`` long, streamed, with everything the server can tell of
    it."""
    content: dict[str, Any]
    if api == "sglang":
        content = {
            "stream": True,
            "sampling_params": {"max_new_tokens": max(1, output_tokens), "temperature": 0, "ignore_eos": True},
        }
        content["text" if prompt.ids is None else "input_ids"] = prompt.text if prompt.ids is None else prompt.ids
    else:
        content = {
            "model": model,
            "prompt": prompt.text if prompt.ids is None else prompt.ids,
            "max_tokens": max(1, output_tokens),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            "return_token_ids": True,
            "return_cached_tokens_details": True,
        }
    return msgspec.json.encode(content)


class Events:
    """Bytes in, the ``data`` of server-sent events out."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, received: bytes) -> Iterator[bytes]:
        *whole, self._left = (self._left + received).split(b"\n")
        if len(self._left) > _LONGEST_EVENT:
            raise Refused("an event without an end", again=False)
        for line in whole:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@dataclass(slots=True)
class Answer:
    """What has come back so far. Times are those of the clock that the reader was given.

    ``gaps`` are seconds between tokens, one for each after the first; tokens that come together share the time since
    the ones before. ``ids`` is None where the server does not tell them.
    """

    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int = 0
    ids: list[int] | None = None
    text: str = ""
    cached: tuple[int, int, int] | None = None
    storage_wait: float | None = None
    queue: float | None = None
    prefill: float | None = None

    @property
    def digest(self) -> str:
        """Equal for equal outputs."""
        said = repr(self.ids) if self.ids is not None else self.text
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    def take(self, api: Api, event: bytes, now: float) -> None:
        """Take in one event, which came at ``now``. Raises :class:`Refused` when it tells an error."""
        if event == b"[DONE]":
            return
        try:
            content = msgspec.json.decode(event)
        except msgspec.DecodeError as error:
            raise Refused(f"an event that is not JSON: {error}", again=True) from None
        if not isinstance(content, dict):
            raise Refused(f"an event that is no object: {event[:80]!r}", again=False)
        if content.get("error") or content.get("object") == "error":
            said = content.get("error") or content
            raise Refused(str(said.get("message", said) if isinstance(said, dict) else said), again=True)
        (self._sglang if api == "sglang" else self._openai)(content, now)

    def _sglang(self, content: dict[str, Any], now: float) -> None:
        meta: dict[str, Any] = content.get("meta_info") or {}
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise Refused(str(reason.get("message", "aborted")), again=True)
        if "output_ids" in content:
            ids = list(content["output_ids"])
            # With --incremental-streaming-output an event has only the new ones.
            total = int(meta.get("completion_tokens") or len(ids))
            self.ids = ids if len(ids) >= total else [*(self.ids or ()), *ids]
        self.text = content.get("text") or self.text
        self._grown(int(meta.get("completion_tokens") or len(self.ids or ())), now)
        self.prompt_tokens = meta.get("prompt_tokens", self.prompt_tokens)
        if "cached_tokens" in meta:
            details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"] or 0}
            self.cached = _tiers(details)
        self.storage_wait = meta.get("storage_prefetch_wait", self.storage_wait)
        self.queue = meta.get("queue_time", self.queue)
        begun, ended = meta.get("forward_entry_time"), meta.get("prefill_finished_time")
        if begun and ended:
            self.prefill = max(0.0, ended - begun)

    def _openai(self, content: dict[str, Any], now: float) -> None:
        usage: dict[str, Any] = content.get("usage") or {}
        new = 0
        for choice in content.get("choices") or ():
            self.text += choice.get("text") or ""
            if choice.get("token_ids") is not None:
                self.ids = [*(self.ids or ()), *choice["token_ids"]]
                new = len(choice["token_ids"])
            elif choice.get("text"):
                new = 1
        self._grown(max(self.output_tokens + new, int(usage.get("completion_tokens") or 0)), now)
        self.prompt_tokens = usage.get("prompt_tokens") or self.prompt_tokens
        details = (content.get("sglext") or {}).get("cached_tokens_details")
        summed = usage.get("prompt_tokens_details")
        if details:
            self.cached = _tiers(details)
        elif summed and self.cached is None:
            self.cached = (int(summed.get("cached_tokens") or 0), 0, 0)

    def _grown(self, total: int, now: float) -> None:
        new = total - self.output_tokens
        if new <= 0:
            return
        if self.first is None or self.last is None:
            self.first = now
            new -= 1
        if new and self.last is not None:
            self.gaps += [(now - self.last) / new] * new
        elif new:
            self.gaps += [0.0] * new
        self.last = now
        self.output_tokens = total


def _tiers(details: dict[str, Any]) -> tuple[int, int, int]:
    device, host, storage = (int(details.get(tier) or 0) for tier in ("device", "host", "storage"))
    return device, host, storage
