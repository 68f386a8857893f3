"""Orders to the nodes: pin, unpin, evict, verify. The local node passes them on; each owner carries out its part."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hicache_mooncake import config_values
from hicache_mooncake.config import Settings
from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError, ProtocolError, Unavailable
from hicache_mooncake.operate import pool_view, prompts
from hicache_mooncake.protocol import orders as o
from hicache_mooncake.radix_bridge import printable_hash, split_object_key

ANSWER_WITHIN = 30.0
"""Seconds the nodes have to carry out an order that is no job."""

POLL_EVERY = 0.2
"""Seconds between two looks at a job."""


@dataclass
class Outcome:
    """What became of an order in the whole pool. ``pages`` were named, ``found`` of them are held by somebody."""

    objects: int = 0
    bytes: int = 0
    left: int = 0
    pages: int = 0
    found: int = 0
    unreached: list[str] | None = None


def pin(given: argparse.Namespace, settings: Settings) -> Outcome:
    ttl = _duration(given.ttl) if given.ttl else 0.0
    if given.hard and ttl:
        raise ConfigError("--ttl", given.ttl, "a hard pin has no end", hint="leave out --hard or --ttl")
    return _of_pages(given, settings, lambda some, where: o.Pin(some, where, given.hard, ttl))


def unpin(given: argparse.Namespace, settings: Settings) -> Outcome:
    return _of_pages(given, settings, o.Unpin)


def evict(given: argparse.Namespace, settings: Settings) -> Outcome:
    if given.key or given.tokens:
        if given.bytes or given.tenant:
            raise ConfigError("--bytes", given.bytes or given.tenant, "pages are named already", hint="leave it out")
        return _of_pages(given, settings, o.Evict)
    if given.bytes:
        if given.namespace or given.tenant:
            raise ConfigError("--bytes", given.bytes, "an amount is of any namespace", hint="leave one of them out")
        return _sum([_ask(settings, o.Evict(size=_size(given.bytes)), given.on)])
    digests = [*given.namespace, *(_digests_of(settings, given.tenant) if given.tenant else [])]
    if not digests:
        raise ConfigError("KEY", "", "a page, --tokens, --namespace, --tenant or --bytes is expected")
    return _sum([_ask(settings, o.Evict(digests=digests), given.on)])


def verify(given: argparse.Namespace, settings: Settings) -> tuple[dict[str, o.Job], list[str]]:
    """Have nodes check all they hold, and wait for them; interrupted, they are told to stop."""
    bandwidth = _size(given.bandwidth) if given.bandwidth else 0
    with pool_view.local_node(settings) as node:
        answers, unreached = node.order(o.Verify(bandwidth), given.nodes, ANSWER_WITHIN)
        asked = sorted(answers)
        try:
            while True:
                jobs = {name: answer for name, answer in answers.items() if isinstance(answer, o.Job)}
                _show_progress(jobs)
                if all(job.state != "running" for job in jobs.values()):
                    break
                time.sleep(POLL_EVERY)
                answers, lost = node.order(o.Progress("verify"), asked, ANSWER_WITHIN)
                unreached |= lost
        except KeyboardInterrupt:
            node.order(o.Cancel("verify"), asked, ANSWER_WITHIN)
            raise
    return jobs, [*unreached, *(name for name in asked if name not in jobs and name not in unreached)]


def replicas(settings: Settings, hashes: Sequence[str]) -> dict[str, list[tuple[str, o.Replica]]]:
    """How the owners have the pages: by object key. Empty where no node of this host can be asked."""
    found: dict[str, list[tuple[str, o.Replica]]] = {}
    try:
        with pool_view.local_node(settings) as node:
            for start in range(0, len(hashes), o.PAGES_AT_ONCE):
                some = list(hashes[start : start + o.PAGES_AT_ONCE])
                answers, _ = node.order(o.Describe(some), [], ANSWER_WITHIN)
                for name, answer in answers.items():
                    if isinstance(answer, o.Described):
                        for replica in answer.replicas:
                            found.setdefault(replica.key, []).append((name, replica))
    except HiCacheMooncakeError:
        return found
    return found


def _of_pages(
    given: argparse.Namespace, settings: Settings, make: Callable[[list[str], list[str]], o.Order]
) -> Outcome:
    hashes, digests = [], list(given.namespace)
    for word in given.key:
        try:
            digest, page_hash, _ = split_object_key(word)
        except ValueError:
            hashes.append(printable_hash(word))
        else:
            hashes.append(page_hash)
            digests.append(digest)
    named = len(hashes)
    if given.tokens:
        pages, named = prompts.pages_of_tokens(given, settings)
        hashes += pages
        named += len(given.key)
    if not hashes:
        raise ConfigError("KEY", "", "a page hash, an object key or --tokens is expected")
    outcome = Outcome(pages=named, unreached=[])
    with pool_view.local_node(settings) as node:
        for start in range(0, len(hashes), o.PAGES_AT_ONCE):
            some = hashes[start : start + o.PAGES_AT_ONCE]
            part = _sum([node.order(make(some, digests), given.on, ANSWER_WITHIN)])
            outcome.objects += part.objects
            outcome.bytes += part.bytes
            outcome.left += part.left
            outcome.found += part.found
            outcome.unreached = sorted({*(outcome.unreached or []), *(part.unreached or [])})
    return outcome


def _ask(settings: Settings, order: o.Order, nodes: Sequence[str]) -> tuple[dict[str, o.Answer], set[str]]:
    with pool_view.local_node(settings) as node:
        return node.order(order, nodes, ANSWER_WITHIN)


def _sum(replies: Sequence[tuple[Mapping[str, o.Answer], set[str]]]) -> Outcome:
    total = Outcome(unreached=[])
    for answers, unreached in replies:
        here = 0
        for name, answer in answers.items():
            if isinstance(answer, o.Declined):
                raise ProtocolError(f"node {name} declines: {answer.reason}")
            if not isinstance(answer, o.Handled):
                raise Unavailable(f"node {name} did not say what it did")
            total.objects += answer.objects
            total.bytes += answer.size
            total.left += answer.left
            here |= int.from_bytes(answer.found, "little")
        total.found += here.bit_count()
        total.unreached = sorted(unreached)
    return total


def _digests_of(settings: Settings, tenant: str) -> list[str]:
    with pool_view.directory(settings) as pool:
        spaces = pool.namespaces()
    found = [digest for digest, fields in spaces.items() if fields.get("tenant", "default") == tenant]
    if not found:
        listed = ", ".join(sorted({fields.get("tenant", "default") for fields in spaces.values()})) or "none"
        raise ConfigError("--tenant", tenant, f"it has no namespace in the pool; tenants that have: {listed}")
    return found


def _show_progress(jobs: Mapping[str, o.Job]) -> None:
    if sys.stderr.isatty():
        done, total = (sum(getattr(job, name) for job in jobs.values()) for name in ("done", "total"))
        running = any(job.state == "running" for job in jobs.values())
        share = 100 * done / total if total else 100
        sys.stderr.write(
            f"\r{share:5.1f} % of {total >> 20} MiB on {len(jobs)} nodes checked" + ("" if running else "\n")
        )
        sys.stderr.flush()


def _duration(text: str) -> float:
    try:
        seconds = config_values.duration(text)
    except ValueError as error:
        raise ConfigError("--ttl", text, str(error)) from None
    if not 1 <= seconds <= 86400:
        raise ConfigError("--ttl", text, "1 s to 24 h is expected")
    return float(seconds)


def _size(text: str) -> int:
    try:
        size = int(config_values.size(text))
    except ValueError as error:
        raise ConfigError("--bytes", text, str(error)) from None
    if size <= 0:
        raise ConfigError("--bytes", text, "more than 0 is expected")
    return size
