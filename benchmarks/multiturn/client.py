"""Requests to a server over HTTP: streamed answers timed as they come, tries counted, connections bounded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from benchmarks.multiturn.api import PATHS, Answer, Api, Events, Prompt, Refused, body
from benchmarks.multiturn.provenance import counters, server_facts
from hicache_mooncake.errors import Unavailable

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE = 0.2
_ASK_WITHIN = 20.0
"""Seconds for the small questions: what are you, what have you counted."""


@dataclass(slots=True)
class Exchange:
    """One request: when it went out first, how often again, and what came of it. ``error`` is empty when all went
    well."""

    sent: float
    done: float
    retries: int
    answer: Answer
    error: str


class Client:
    """A server's client; an async context manager. At most ``connections`` connections are open at a time."""

    def __init__(
        self, url: str, api: Api, *, model: str, api_key: str, connections: int, timeout: float, retries: int
    ) -> None:
        self.api = api
        self.model = model
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connections = connections
        self._timeout = timeout
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, read_bufsize=1 << 20)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def greet(self) -> dict[str, Any]:
        """What the server says of itself; finds the model's name for an OpenAI API that was not given one.

        Raises :class:`Unavailable` when nothing answers.
        """
        facts: dict[str, Any] = {}
        for path in ("/server_info", "/get_server_info", "/v1/models"):
            told = await self._told(path)
            if told and path == "/v1/models":
                names = [str(model.get("id")) for model in told.get("data", ()) if isinstance(model, dict)]
                facts.setdefault("models", names)
                self.model = self.model or (names[0] if names else "")
            elif told and not facts:
                facts = server_facts(told)
        return facts

    async def counters(self, url: str = "") -> dict[str, float]:
        """The counters of a metrics page, the server's own by default; none where there is no such page."""
        assert self._session is not None
        try:
            timeout = aiohttp.ClientTimeout(total=_ASK_WITHIN)
            async with self._session.get(url or f"{self._url}/metrics", timeout=timeout) as response:
                return counters(await response.text()) if response.status == 200 else {}
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return {}

    async def ask(self, prompt: Prompt, output_tokens: int) -> Exchange:
        """Send one request, again after what may pass, until an answer is whole or the time is over. Never raises for
        what a server or the network does.
        """
        content = body(self.api, self.model, prompt, output_tokens)
        sent = time.perf_counter()
        retries = 0
        while True:
            answer = Answer()
            left = sent + self._timeout - time.perf_counter()
            try:
                await self._try(content, answer, left)
                return Exchange(sent, answer.last or time.perf_counter(), retries, answer, "")
            except Refused as refused:
                error, again = str(refused), refused.again
            except (aiohttp.ClientError, OSError, TimeoutError, asyncio.TimeoutError) as failure:
                timed_out = isinstance(failure, TimeoutError | asyncio.TimeoutError)
                error = f"no answer within {self._timeout:g} s" if timed_out else f"{type(failure).__name__}: {failure}"
                again = not timed_out
            pause = _FIRST_PAUSE * 2**retries * random.uniform(0.5, 1.0)
            if not again or retries >= self._retries or time.perf_counter() + pause > sent + self._timeout:
                return Exchange(sent, time.perf_counter(), retries, answer, error)
            retries += 1
            await asyncio.sleep(pause)

    async def _try(self, content: bytes, answer: Answer, within: float) -> None:
        async with self._open("POST", PATHS[self.api], content, within) as response:
            if response.status != 200:
                said = (await response.text())[:500]
                raise Refused(f"HTTP {response.status}: {said}", again=response.status in _AGAIN)
            events = Events()
            async for received in response.content.iter_any():
                now = time.perf_counter()
                for event in events.feed(received):
                    answer.take(self.api, event, now)
        if answer.first is None:
            raise Refused("an answer without a token", again=True)

    async def _told(self, path: str) -> Mapping[str, Any]:
        try:
            async with self._open("GET", path, None, _ASK_WITHIN) as response:
                told = msgspec.json.decode(await response.read()) if response.status == 200 else {}
        except (aiohttp.ClientConnectionError, TimeoutError, asyncio.TimeoutError) as error:
            raise Unavailable(
                f"no server answers at {self._url}: {error}", hint="is it started, and is --url its?"
            ) from None
        except (aiohttp.ClientError, msgspec.DecodeError):
            return {}
        return told if isinstance(told, dict) else {}

    def _open(self, method: str, path: str, content: bytes | None, within: float) -> Any:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=max(0.001, within), sock_connect=min(within, 30.0))
        return self._session.request(method, self._url + path, data=content, timeout=timeout)
