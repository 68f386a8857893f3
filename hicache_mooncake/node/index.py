"""What a node holds: object key -> page, in the order of last use, by how well it is protected. Pure bookkeeping.

A page's life here: :meth:`PageIndex.insert_all` makes it visible; ``pin_all`` keeps its memory while somebody reads it;
``forget`` makes it invisible at once, held by the forgetter's own pin; its memory is given back with the last
``unpin``.

Who goes when memory is needed is near-LRU with Mooncake's classes (``mooncake-store/src/master_service.cpp``,
``BatchEvict``). First cold *extra* copies, which somebody else holds as well; then what is not pinned; and only where
that was not enough, what is soft-pinned. What is hard-pinned or being read never goes. The parts of a page (object keys
that differ only after the last ``:``) are a **group**: they have one class, stay while any of them is being read, are
as young as the youngest, and go together.

Not thread-safe: the store's lock is held around every call. Times are ``time.monotonic()`` seconds.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum

from hicache_mooncake.allocator import ExtentAllocator, Span
from hicache_mooncake.memory import Extent
from hicache_mooncake.radix_bridge import DIGEST_LENGTH

EXTRA_COLD_AFTER = 30.0
"""Seconds without a use after which an extra copy goes before anything else (Mooncake's cooldown of hot replicas)."""

MAX_PARTS = 256
"""Parts of a page that are held together; ranks and head shards are far fewer. Further ones go on their own."""


_footprint = ExtentAllocator.footprint


class Protection(IntEnum):
    """What an operator has asked for a page: ``SOFT`` goes after everything unpinned, ``HARD`` never."""

    NONE = 0
    SOFT = 1
    HARD = 2


class Page:
    """One stored object: its bytes lie in ``extents``, which cover ``spans`` of the segment.

    ``extra``: a copy that was made beside another one, because the page is hot or replicas were asked for.
    ``pins`` is how many readers it has, ``used`` when it was last asked for. A soft pin ends at ``pinned_until``, which
    every use moves to ``pin_ttl`` from then.
    """

    __slots__ = (
        "checksum",
        "extents",
        "extra",
        "forgotten",
        "key",
        "pin_ttl",
        "pinned_until",
        "pins",
        "protection",
        "size",
        "spans",
        "used",
    )

    def __init__(
        self,
        key: str,
        size: int,
        checksum: int,
        spans: tuple[Span, ...],
        extents: Sequence[Extent],
        *,
        extra: bool = False,
    ) -> None:
        self.key = key
        self.size = size
        self.checksum = checksum
        self.spans = spans
        self.extents = extents
        self.extra = extra
        self.protection = Protection.NONE
        self.pins = 0
        self.used = self.pin_ttl = self.pinned_until = 0.0
        self.forgotten = False

    @property
    def footprint(self) -> int:
        """Bytes of the segment that it takes."""
        return _footprint(self.size)


class PageIndex:
    """The authority on what this node holds; every class of pages from the least to the most recently used one."""

    def __init__(self) -> None:
        self._plain: OrderedDict[str, Page] = OrderedDict()
        # Everything else, which is little: looked for only after the plain pages.
        self._others: dict[str, Page] = {}
        self._extra: OrderedDict[str, Page] = OrderedDict()
        self._soft: OrderedDict[str, Page] = OrderedDict()
        self._hard: OrderedDict[str, Page] = OrderedDict()
        self._expiries: list[tuple[float, int, Page]] = []  # a heap; an entry may be older than the pin
        self._serial = 0
        self._parts: dict[str, dict[str, int]] = {}  # namespace digest -> part -> pages held
        self.pinned = 0  # pins outstanding, over all pages
        self.leaving_bytes = 0  # of forgotten pages that somebody still holds
        self.hard_bytes = 0
        self.soft_bytes = 0
        self.extra_bytes = 0

    def __len__(self) -> int:
        return len(self._plain) + len(self._others)

    def __contains__(self, key: str) -> bool:
        return key in self._plain or key in self._others

    def snapshot(self) -> list[Page]:
        """Every page, in no order. A million pages take 30 ms as a plain dictionary, by last use half a second."""
        return [*dict.values(self._plain), *self._others.values()]

    def get(self, key: str) -> Page | None:
        """The page, without touching its recency."""
        return self._plain.get(key) or self._others.get(key)

    def find(self, page_hash: str, digests: Iterable[str] = ()) -> list[Page]:
        """Every part of a page in these namespaces, or in all; touches nothing."""
        found = []
        for digest in digests or self._parts:
            for part in self._parts.get(digest, ()):
                page = self.get(f"{digest}:{page_hash}:{part}")
                if page is not None:
                    found.append(page)
        return found

    # -- use

    def touch_all(self, keys: Sequence[str], now: float) -> list[bool]:
        """Which pages are here; moves them to the young end. Never pins."""
        self.expire(now)
        get, move, others = self._plain.get, self._plain.move_to_end, self._others
        found = []
        for key in keys:
            page = get(key)
            if page is not None:
                move(key)
                page.used = now
                found.append(True)
            else:
                found.append(key in others and self._use(others[key], now))
        return found

    def pin_all(self, keys: Sequence[str], now: float) -> list[Page | None]:
        """The pages, each with one more pin, moved to the young end; None for what is not here."""
        self.expire(now)
        get, move, others = self._plain.get, self._plain.move_to_end, self._others
        found: list[Page | None] = []
        for key in keys:
            page = get(key)
            if page is not None:
                move(key)
                page.used = now
            elif key in others:
                page = others[key]
                self._use(page, now)
            else:
                found.append(None)
                continue
            page.pins += 1
            self.pinned += 1
            found.append(page)
        return found

    def _use(self, page: Page, now: float) -> bool:
        self._queue(page).move_to_end(page.key)
        page.used = now
        if page.protection is Protection.SOFT:
            page.pinned_until = now + page.pin_ttl
        return True

    def hold(self, pages: Iterable[Page]) -> None:
        """Pin pages without making them any younger: for who only looks after them."""
        for page in pages:
            page.pins += 1
            self.pinned += 1

    def unpin(self, page: Page) -> bool:
        """Take one pin back. True when the page was forgotten and this was its last pin: its memory is free now."""
        if page.pins <= 0:
            raise ValueError(f"page {page.key} is not pinned")
        page.pins -= 1
        self.pinned -= 1
        if not page.forgotten or page.pins:
            return False
        self.leaving_bytes -= _footprint(page.size)
        return True

    # -- coming and going

    def insert_all(self, pages: Sequence[Page], now: float) -> list[bool]:
        """Make pages visible, at the young end and in the class of the parts that are here already.

        False where another page is stored under the key (it is kept).
        """
        self.expire(now)
        plain, others, spaces = self._plain, self._others, self._parts
        fresh = []
        for page in pages:
            key = page.key
            if key in plain or key in others:
                fresh.append(False)
                continue
            head, _, part = key.rpartition(":")
            digest = head[:DIGEST_LENGTH]
            parts = spaces.get(digest)
            if parts is None:
                parts = spaces[digest] = {}
            parts[part] = parts.get(part, 0) + 1
            page.used = now
            fresh.append(True)
            grouped = 1 < len(parts) <= MAX_PARTS
            if page.extra or (others and grouped and any(f"{head}:{other}" in others for other in parts)):
                self._file(page)
                self._join(page, now)
            else:
                plain[key] = page
        return fresh

    def forget(self, pages: Iterable[Page]) -> list[Page]:
        """Make pages invisible and pin them, so that the caller says when their memory goes; not those gone before."""
        gone = [page for page in pages if not page.forgotten]
        for page in gone:
            head, _, part = page.key.rpartition(":")
            self._forget(page, head, part)
        return gone

    def _forget(self, page: Page, head: str, part: str) -> None:
        if page.extra or page.protection:
            self._unfile(page)
        else:
            del self._plain[page.key]
        digest = head[:DIGEST_LENGTH]
        parts = self._parts[digest]
        if parts[part] > 1:
            parts[part] -= 1
        else:
            del parts[part]
            if not parts:
                del self._parts[digest]
        page.forgotten = True
        page.pins += 1
        self.pinned += 1
        self.leaving_bytes += _footprint(page.size)

    # -- groups and classes

    def group(self, page: Page) -> list[Page]:
        """Every part of the page that is here, ``page`` among them; they go or stay together."""
        head, _, part = page.key.rpartition(":")
        parts = self._parts.get(head[:DIGEST_LENGTH], ())
        if not head or not 1 < len(parts) <= MAX_PARTS:
            return [page]
        plain, others = self._plain.get, self._others.get
        members = [page if other == part else plain(f"{head}:{other}") or others(f"{head}:{other}") for other in parts]
        return [member for member in members if member is not None]

    def _join(self, page: Page, now: float) -> None:
        """A new part takes the class of the others; extra the whole is only while all of it is."""
        members = self.group(page)
        first = next((member for member in members if member is not page), None)
        if first is None:
            return
        if page.extra and not first.extra:
            self._refile([page], extra=False)
        elif first.extra and not page.extra:
            self._refile([member for member in members if member is not page], extra=False)
        if first.protection is not Protection.NONE:
            self.protect(page, first.protection, first.pin_ttl, now)

    def protect(self, page: Page, protection: Protection, ttl: float, now: float) -> None:
        """Put the page's group into a class; ``ttl`` (seconds) is for ``SOFT``."""
        members = self.group(page)
        for member in members:
            self._unfile(member)
            member.protection = protection
            member.pin_ttl = ttl if protection is Protection.SOFT else 0.0
            member.pinned_until = now + member.pin_ttl
            self._file(member)
            if protection is Protection.SOFT:
                self._expire_at(member.pinned_until, member)
        if len(self._expiries) > 64 + 2 * len(self._soft):  # pinned, and pinned again, over and over
            live = {id(entry[2]): entry for entry in sorted(self._expiries, reverse=True) if self._is_soft(entry[2])}
            self._expiries = sorted(live.values())

    def _expire_at(self, until: float, page: Page) -> None:
        self._serial += 1
        heapq.heappush(self._expiries, (until, self._serial, page))

    def settle(self, page: Page) -> None:
        """The page's group is extra no longer: nobody else holds it any more."""
        self._refile(self.group(page), extra=False)

    def expire(self, now: float) -> None:
        """End the soft pins of pages that were not used for the whole of their TTL; they are the coldest from then."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, page = heapq.heappop(self._expiries)
            if not self._is_soft(page):
                continue
            members = self.group(page)
            until = max(member.pinned_until for member in members)
            if until > now:
                self._expire_at(until, page)
                continue
            for member in members:
                self._unfile(member)
                member.protection = Protection.NONE
                self._file(member)
                if not member.extra:  # those are asked for their age by the oldest, which must not be a younger one
                    self._plain.move_to_end(member.key, last=False)

    def _is_soft(self, page: Page) -> bool:
        return not page.forgotten and page.protection is Protection.SOFT

    def _queue(self, page: Page) -> OrderedDict[str, Page]:
        if page.protection is Protection.NONE:
            return self._extra if page.extra else self._plain
        return self._soft if page.protection is Protection.SOFT else self._hard

    def _refile(self, pages: Iterable[Page], *, extra: bool) -> None:
        for page in pages:
            self._unfile(page)
            page.extra = extra
            self._file(page)

    def _file(self, page: Page) -> None:
        queue = self._queue(page)
        queue[page.key] = page
        if queue is not self._plain:
            self._others[page.key] = page
            self._count(page, page.footprint)

    def _unfile(self, page: Page) -> None:
        queue = self._queue(page)
        del queue[page.key]
        if queue is not self._plain:
            del self._others[page.key]
            self._count(page, -page.footprint)

    def _count(self, page: Page, size: int) -> None:
        if page.protection is Protection.HARD:
            self.hard_bytes += size
        elif page.protection is Protection.SOFT:
            self.soft_bytes += size
        else:
            self.extra_bytes += size

    # -- eviction

    def cold_extras(self, footprint: int, now: float, *, at_least: int) -> list[Page]:
        """The extra copies that go first if ``footprint`` bytes are needed, and so many of them if any are."""
        found: list[Page] = []
        for page in self._extra.values() if footprint > 0 else ():
            if (footprint <= 0 and len(found) >= at_least) or now - page.used < EXTRA_COLD_AFTER:
                break
            found.append(page)
            footprint -= page.footprint
        return found

    def coldest(self, footprint: int, now: float) -> list[Page]:
        """Unpinned pages in about the order in which they would go, that take ``footprint`` bytes, or all there are."""
        found = self.cold_extras(footprint, now, at_least=0)
        footprint -= sum([page.footprint for page in found])
        for page in self._plain.values():
            if footprint <= 0:
                break
            if not page.pins:
                found.append(page)
                footprint -= page.footprint
        return found

    def evict(self, footprint: int, now: float, *, at_least: int = 0) -> list[Page]:
        """:meth:`forget` cold pages that take ``footprint`` bytes or more, or all that may go.

        The first round takes ``at_least`` so many pages; what is soft-pinned goes for ``footprint`` alone.
        """
        self.expire(now)
        chosen: list[Page] = []
        footprint = self._evict_round(chosen, footprint, at_least, now, soft=False)
        if footprint > 0:
            self._evict_round(chosen, footprint, 0, now, soft=True)
        return chosen

    def _evict_round(self, chosen: list[Page], footprint: int, at_least: int, now: float, *, soft: bool) -> int:
        """What is left of ``footprint``."""
        # Each page is passed over at most once in a round: it may be younger than it looks, or all are being read.
        passes = len(self._soft) if soft else len(self._plain) + len(self._extra)
        while footprint > 0 or len(chosen) < at_least:
            page = next(iter(self._soft.values()), None) if soft else self._coldest(now)
            if page is None:
                break
            head, _, part = page.key.rpartition(":")
            if not head or len(self._parts[head[:DIGEST_LENGTH]]) == 1:  # as most pages are: on its own
                if not page.pins:
                    self._forget(page, head, part)
                    footprint -= _footprint(page.size)
                    chosen.append(page)
                    continue
                youngest = now
            else:
                members = self.group(page)
                youngest = max([member.used for member in members])
                if any([member.pins for member in members]):  # noqa: C419 - a few: a generator takes longer
                    youngest = now
                elif youngest <= page.used:
                    chosen += self.forget(members)
                    footprint -= sum([_footprint(member.size) for member in members])
                    continue
            page.used = youngest
            self._queue(page).move_to_end(page.key)
            passes -= 1
            if passes < 0:
                break
        return footprint

    def _coldest(self, now: float) -> Page | None:
        plain = next(iter(self._plain.values()), None)
        if not self._extra:
            return plain
        extra = next(iter(self._extra.values()))
        if plain is None or now - extra.used >= EXTRA_COLD_AFTER or extra.used < plain.used:
            return extra
        return plain
