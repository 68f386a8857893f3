"""What an engine keeps for its whole life: memory it lends, namespaces it uses, and a link to the node of its host.

Nothing here raises into SGLang. A call that the node does not answer in time is a set of misses; while there is no
node, every call is, at once, and a thread of ours looks for one.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hicache_mooncake import memory
from hicache_mooncake.engine.lending import Lendable
from hicache_mooncake.engine.link import Busy, Finder, Line, Link, StartFailed, reason, receive_reply
from hicache_mooncake.engine.quiesce import wait_for_silence
from hicache_mooncake.errors import HiCacheMooncakeError, ProtocolError, Unavailable
from hicache_mooncake.memory import Memory
from hicache_mooncake.protocol import messages as m
from hicache_mooncake.protocol.channel import close_all

logger = logging.getLogger(__name__)

NODE_SHARE = 0.8
"""Part of a call's time that the node gets; the rest is for its answer to arrive, or for making sure of its silence."""

ATTACH_TIMEOUT = 9.0
"""Seconds that the first session may take, starting a node included: an attach that cannot work says so within ten."""

OPEN_TIMEOUT = 5.0
"""Seconds that renewing a session, or one order in it, may take."""

PROBE_TIMEOUT = 1.0
"""Seconds that a node which missed a deadline has to show that it is alive, before its session is given up."""

FIRST_RETRY, LONGEST_RETRY = 0.25, 5.0
"""Seconds between two attempts to reach a node, doubling from the first to the longest."""

SAY_AGAIN = 60.0
"""Seconds after which the log repeats what has not changed."""


class NodeSession:
    """Thread-safe. ``finder`` knows where the node is, and may start one."""

    def __init__(self, finder: Finder, *, pool: str, label: str, op_timeout: float) -> None:
        self._finder = finder
        self._pool = pool
        self._label = label
        self.op_timeout = op_timeout
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._regions: list[Lendable] = []
        self._namespaces: dict[str, dict[str, str]] = {}
        self._page_tokens: dict[str, int] = {}
        self._closed = False
        self._wake = threading.Event()
        self._renewer: threading.Thread | None = None
        self._count_lock = threading.Lock()
        self._said: dict[str, float] = {}
        self.failures: dict[str, int] = {}

    # -- life

    def open(self) -> m.Welcome:
        """Connect for the first time. Raises ``Unavailable``, ``ProtocolError``, a started node's ``ConfigError``."""
        give_up = time.monotonic() + ATTACH_TIMEOUT
        while True:
            try:
                link = self._open_link(give_up)
                break
            except StartFailed:
                raise
            except Unavailable:
                # A node that was just leaving when we came: the next attempt finds none, and starts one.
                if not self._finder.may_start or time.monotonic() + FIRST_RETRY > give_up - OPEN_TIMEOUT:
                    raise
                time.sleep(FIRST_RETRY)
        self._renewer = threading.Thread(target=self._keep_linked, name="hcm-session", daemon=True)
        self._renewer.start()
        return link.welcome

    def _open_link(self, deadline: float) -> Link:
        link = Link(self._finder, self._pool, self._label, deadline)
        try:
            with self._lock:
                if self._closed:
                    raise Unavailable("the session is closed")
                link.lend(self._regions, deadline)
                if self._namespaces:
                    link.order(m.Declare(self._namespaces, self._page_tokens), deadline)
                self._link = link
        except BaseException:
            link.close()
            raise
        return link

    def _keep_linked(self) -> None:
        """Replace a link that is broken, in a thread of its own: callers never wait for it."""
        pause = FIRST_RETRY
        while not self._closed:
            try:
                linked = self._look_after_link()
            except Exception:
                # Without this thread the engine would miss for the rest of its life.
                logger.exception("looking for a node failed; trying again")
                linked = False
            if linked:
                pause = FIRST_RETRY
            self._wake.wait(1.0 if linked else pause)
            self._wake.clear()
            if not linked:
                pause = min(LONGEST_RETRY, 2 * pause)

    def _look_after_link(self) -> bool:
        """Whether there is a link that works, after having tried to make one."""
        link = self._link
        if link is not None:
            working = not (link.broken.is_set() or link.dead())
            if working and (not link.silent.is_set() or self._answers(link)):
                return True
            with self._lock:
                self._link = None
            if not self._closed:
                logger.warning("node %s is gone: every page is a miss until there is one", link.welcome.node_id)
            link.close()
        try:
            timeout = ATTACH_TIMEOUT if self._finder.may_start else OPEN_TIMEOUT
            renewed = self._open_link(time.monotonic() + timeout)
        except (HiCacheMooncakeError, OSError) as error:
            if not self._closed:
                self._say(f"no node yet: {error}")
            return False
        logger.warning("node %s is connected", renewed.welcome.node_id)
        return True

    def _answers(self, link: Link) -> bool:
        """Whether a node that did not answer does so again; if not, the link is broken."""
        try:
            link.order(m.Declare({}), time.monotonic() + PROBE_TIMEOUT)
        except HiCacheMooncakeError:
            return False
        link.silent.clear()
        return True

    def close(self) -> None:
        """Detach from the node, when the calls under way have ended. Safe to call again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            link, self._link = self._link, None
        self._wake.set()
        if link is not None:
            link.close()
        if self._renewer is not None:
            self._renewer.join(timeout=1.0)  # one that waits for a node notices later, and touches nothing of ours
        with self._lock:
            regions, self._regions = self._regions, []
        close_all([region.fd for region in regions])

    @property
    def connected(self) -> bool:
        link = self._link
        return link is not None and not link.broken.is_set()

    @property
    def can_write_in_place(self) -> bool:
        """Whether the node may work on lent memory: only one that this engine could stop."""
        link = self._link
        return link is not None and _can_be_stopped(link)

    # -- what the node knows of this engine

    def lend(self, regions: Sequence[Lendable]) -> None:
        """Let this node, and every later one, map these regions; takes their descriptors.

        A node that is just going is no error: the next one is told. Raises ``ProtocolError`` when a node cannot map
        them; their descriptors are closed then.
        """
        with self._lock:
            self._regions.extend(regions)
            link = self._link
        if link is None or not regions:
            return
        try:
            link.lend(regions, time.monotonic() + OPEN_TIMEOUT)
        except Unavailable as error:
            self._failed(link, error)
        except ProtocolError:
            with self._lock:  # or no later link could ever be opened
                self._regions = [region for region in self._regions if region not in regions]
            close_all([region.fd for region in regions])
            raise

    def declare(self, digest: str, fields: Mapping[str, str], page_tokens: int = 0) -> None:
        """Have a namespace described in Redis, by this node and every later one.

        ``page_tokens``: what a page of it counts for in the node's metrics; 0 where another rank counts it.
        """
        with self._lock:
            self._namespaces[digest] = dict(fields)
            if page_tokens:
                self._page_tokens[digest] = page_tokens
            link = self._link
        if link is None:
            return
        try:
            link.order(
                m.Declare({digest: dict(fields)}, {digest: page_tokens} if page_tokens else {}),
                time.monotonic() + OPEN_TIMEOUT,
            )
        except HiCacheMooncakeError as error:
            self._failed(link, error)

    # -- requests

    def ask(self, message: m.Exists | m.Clear | m.Stats) -> m.Reply | None:
        """A request that touches no memory; None when the node did not answer within ``op_timeout``."""
        deadline = time.monotonic() + self.op_timeout
        link, line = self._take(deadline)
        if link is None or line is None:
            return None
        try:
            line.channel.send(message, deadline)
            reply = receive_reply(line.channel, deadline)
        except HiCacheMooncakeError as error:
            self._lost(link, line, error)
            return None
        except BaseException:
            link.discard(line)
            raise
        return self._checked(link, line, reply)

    def budget_ms(self, deadline: float) -> int:
        """What of the time up to ``deadline`` the node may use."""
        return max(1, int((deadline - time.monotonic()) * NODE_SHARE * 1000))

    def move(self, kind: type[m.Put] | type[m.Get], groups: Sequence[m.Pages], deadline: float) -> list[bytes] | None:
        """Store or fetch pages that lie in lent memory: statuses by group, None when the node did not answer.

        When this returns, nothing writes into the pages any more.
        """
        link, line = self._take(deadline)
        if link is None or line is None:
            return None
        if not _can_be_stopped(link):  # another node than the one that the memory was lent to
            link.give_back(line)
            return None
        return self._move_on(link, line, kind, groups, deadline, in_place=True)

    def move_staged(
        self,
        kind: type[m.Put] | type[m.Get],
        build: Callable[[Memory], m.Pages],
        done: Callable[[Memory, bytes], None],
        size: int,
        deadline: float,
    ) -> bool:
        """Like :meth:`move`, through a staging area of at least ``size`` bytes that only this request uses.

        ``build`` fills it (or only lays it out) and says what lies where; ``done`` gets the statuses. False when the
        node did not answer: the area is then never used again, so a late write into it harms nobody.
        """
        link, line = self._take(deadline)
        if link is None or line is None:
            return False
        try:
            staging = self._staging(line, size, deadline)
            group = build(staging)
        except (HiCacheMooncakeError, OSError) as error:
            self._lost(link, line, error)
            return False
        except BaseException:
            link.discard(line)
            raise
        statuses = self._move_on(
            link, line, kind, [group], deadline, in_place=False, then=lambda got: done(staging, got[0])
        )
        return statuses is not None

    def _staging(self, line: Line, size: int, deadline: float) -> Memory:
        """The line's staging area, made or made anew when it is too small."""
        if line.staging is not None and line.staging.size >= size:
            return line.staging
        if line.staging is not None:
            line.staging.close()
        staging = line.staging = memory.create("hicache-mooncake-staging", size)
        line.channel.send(m.Stage(m.Region(staging.address, staging.size, 0)), deadline, [staging.fd])
        reply = receive_reply(line.channel, deadline)
        if not isinstance(reply, m.Done):
            raise ProtocolError(f"the node refused a staging area: {reason(reply)}")
        return staging

    def _move_on(
        self,
        link: Link,
        line: Line,
        kind: type[m.Put] | type[m.Get],
        groups: Sequence[m.Pages],
        deadline: float,
        *,
        in_place: bool,
        then: Callable[[list[bytes]], None] = lambda statuses: None,
    ) -> list[bytes] | None:
        request = next(self._requests)
        link.fence.allow(line.slot, request)
        try:
            # The node's answer is waited for until shortly before the deadline; what is left is for its silence.
            patience = deadline - (deadline - time.monotonic()) * (1 - NODE_SHARE) / 2
            line.channel.send(kind(request, self.budget_ms(deadline), list(groups)), patience)
            reply = receive_reply(line.channel, patience)
        except BaseException as error:
            self._silence(link, line, request, deadline, in_place=in_place)
            if isinstance(error, HiCacheMooncakeError):
                self._lost(link, line, error)
                return None
            link.discard(line)
            raise
        link.fence.finish(line.slot)
        if not isinstance(reply, m.Moved) or not _fits(reply, groups):
            self._lost(link, line, ProtocolError(f"not an answer to a {kind.__name__}: {reason(reply)}"))
            return None
        try:
            then(reply.statuses)
        except BaseException:
            link.discard(line)
            raise
        link.give_back(line)
        return reply.statuses

    @staticmethod
    def _silence(link: Link, line: Line, request: int, deadline: float, *, in_place: bool) -> None:
        assert link.node is not None
        if link.fence.revoke(line.slot, request) and in_place:
            wait_for_silence(link.fence, line.slot, request, link.node, deadline)

    def _take(self, deadline: float) -> tuple[Link | None, Line | None]:
        link = self._link
        if link is None or link.broken.is_set() or link.silent.is_set():
            self._count("no_node")
            return None, None
        try:
            return link, link.line(deadline)
        except Busy as error:
            self._count("busy")
            self._say(str(error))
        except HiCacheMooncakeError as error:
            self._failed(link, error)
        return None, None

    def _checked(self, link: Link, line: Line, reply: m.Reply) -> m.Reply | None:
        if isinstance(reply, m.Refused):
            self._lost(link, line, ProtocolError(reply.reason))
            return None
        link.give_back(line)
        return reply

    def _lost(self, link: Link, line: Line, error: Exception) -> None:
        link.discard(line)
        self._failed(link, error)

    def _failed(self, link: Link, error: Exception) -> None:
        self._count("refused" if isinstance(error, ProtocolError) else "no_answer")
        self._say(f"node {link.welcome.node_id}: {error}")
        if link.dead():
            link.broken.set()
        elif isinstance(error, Unavailable):
            link.silent.set()
        self._wake.set()

    def _count(self, cause: str) -> None:
        with self._count_lock:
            self.failures[cause] = self.failures.get(cause, 0) + 1

    def _say(self, text: str) -> None:
        """A warning, unless it was said a moment ago: one fault fails many calls."""
        now = time.monotonic()
        with self._count_lock:
            if now - self._said.get(text, -SAY_AGAIN) < SAY_AGAIN:
                return
            if len(self._said) > 100:
                self._said.clear()
            self._said[text] = now
        logger.warning("%s", text)


def _can_be_stopped(link: Link) -> bool:
    return link.node is not None and link.node.can_be_stopped


def _fits(reply: m.Moved, groups: Sequence[m.Pages]) -> bool:
    """Whether there is a status for every object that was asked for."""
    wanted = [len(group.keys.parts) * len(group.keys.hashes) for group in groups]
    return [len(statuses) for statuses in reply.statuses] == wanted
