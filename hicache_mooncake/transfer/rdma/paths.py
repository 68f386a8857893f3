"""A connection's queue pairs, and how a batch is carried out over them: posted, waited for, redone elsewhere, ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from select import POLLIN, poll
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hicache_mooncake.errors import Unavailable
from hicache_mooncake.transfer.tcp_stream import DeadlinePassed, Disconnected, Stream

from . import stripes
from .fabric import Fabric
from .plan import Plan
from .queue_pair import Endpoint, QueuePair
from .status import Fault, Meaning, meaning
from .stripes import PathKey
from .verbs import VerbsError

logger = logging.getLogger(__name__)

LOOK_AT_LINK = 0.1
"""Seconds without a completion after which the link is looked at: the device itself takes half a second to give up."""
PATIENCE = 0.4
"""Part of the time left that a path may show nothing before its work goes to another."""

Keys = NDArray[Any]
Done = Callable[[int, int], None]


class Refused(Unavailable):
    """The peer's device does not let us, or ours does not take the request: no other path will do either."""


class Part(NamedTuple):
    """A range of requests that is under way, and since when."""

    begin: int
    end: int
    since: float


class Path:
    """A queue pair to a peer. ``adapter`` is the number of our device, ``key`` names the path for rests and rates."""

    def __init__(self, pair: QueuePair, adapter: int, key: PathKey, remote_keys: Keys) -> None:
        self.pair, self.adapter, self.key, self.remote_keys = pair, adapter, key, remote_keys
        self.name = pair.device.name
        self.alive = True
        self.parts: deque[Part] = deque()
        self.heard = 0.0
        self._looked = 0.0
        self._armed = False
        self._given_back = -1

    def room(self) -> int:
        """How many requests may be posted now: its credits."""
        return self.pair.depth - sum(part.end - part.begin for part in self.parts)

    def post(self, plan: Plan, begin: int, ends: Sequence[int], local_keys: Keys, remote_keys: Keys) -> None:
        """Hand over requests as one chain, in parts that end at ``ends``."""
        first = plan.chain(begin, ends, local_keys, remote_keys)
        now = time.monotonic()
        if not self.parts:
            self.heard = now
        for end in ends:
            # Noted before they are posted: should posting fail half way, what was taken is ended like the rest.
            self.parts.append(Part(begin, end, now))
            begin = end
        self.pair.post(first)

    def completed(self) -> tuple[list[Part], Meaning | None]:
        """Parts that are done, and why nothing more will be. Then :attr:`parts` holds what was not carried out."""
        done: list[Part] = []
        while len(completions := self.pair.collect()):
            self.heard = time.monotonic()
            for number, status in zip(completions["id"].tolist(), completions["status"].tolist(), strict=True):
                if status:
                    if self.parts and number > self.parts[0].begin:  # those before it were done, in order
                        done += self._take_until(number)
                    self._given_back = int(completions["id"][-1])
                    return done, meaning(status)
                done += self._take_until(number + 1)
        return done, None

    def _take_until(self, end: int) -> list[Part]:
        done: list[Part] = []
        while self.parts:
            part = self.parts[0]
            if part.begin <= end <= part.end:
                if end > part.begin:
                    done.append(part._replace(end=end))
                if end < part.end:
                    self.parts[0] = part._replace(begin=end)
                else:
                    self.parts.popleft()
                break
            done.append(self.parts.popleft())
        return done

    def arm(self) -> bool:
        """Ask to be woken by the next completion; True when it was not asked for yet, so look once more."""
        if self._armed:
            return False
        self.pair.arm()
        self._armed = True
        return True

    def woken(self) -> None:
        self.pair.take_event()
        self._armed = False

    def link_is_down(self, now: float) -> bool:
        """Looked at when nothing was heard for a while, and then not too often."""
        if not self.parts or now - max(self.heard, self._looked) < LOOK_AT_LINK:
            return False
        self._looked = now
        return not self.pair.port_is_active()

    def end(self) -> None:
        """From here on no device writes or reads memory for this path, neither ours nor, by our doing, the peer's."""
        self.alive = False
        last = self.parts[-1].end - 1 if self.parts else self._given_back
        if last != self._given_back and not self.pair.flush(last):
            logger.error("RDMA: %s is slow to give work back; waiting for it", self.name)
        self.parts.clear()
        self.close()

    def close(self) -> None:
        """Destroy the queue pair. Safe to call again."""
        self.alive = False
        try:
            self.pair.close()
        except VerbsError as error:
            logger.error("RDMA: %s", error)


class RdmaStream(Stream):
    """A connection and its paths. They end before it does."""

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self.paths: list[Path] = []
        self.opened: Any = None
        self.awaits_owner = False  # its segment is being registered
        self.look_again = float("inf")
        """When to connect anew, because a path is missing that may have come back (``time.monotonic()``)."""

    def live(self) -> list[Path]:
        return [path for path in self.paths if path.alive]

    def end_paths(self) -> None:
        for path in self.paths:
            path.end()
        self.paths = []

    def close(self) -> None:
        self.end_paths()
        super().close()


def _arm(using: Sequence[Path]) -> bool:
    """Have each path that waits wake us; whether one was not armed yet, and so has to be looked at once more."""
    fresh = False
    for path in using:
        if path.parts:
            fresh |= path.arm()
    return fresh


def connect_all(paths: Sequence[tuple[Path, Endpoint]], deadline: float) -> list[str]:
    """Connect queue pairs, all at once; for each why it cannot be, or nothing. Raises ``DeadlinePassed``.

    The kernel resolves the neighbour's address meanwhile, which takes a second where nobody answers, and knows no
    deadline: so this is done in threads, and whoever comes too late closes his queue pair himself.
    """
    errors = [""] * len(paths)
    lock = threading.Lock()
    late = False

    def connect(at: int, path: Path, end: Endpoint) -> None:
        try:
            path.pair.connect(end)
        except VerbsError as error:
            errors[at] = str(error)
        with lock:
            if late:
                path.close()

    threads = [
        threading.Thread(target=connect, args=(at, *each), name="hcm-connect", daemon=True)
        for at, each in enumerate(paths)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with lock:
        late = any(thread.is_alive() for thread in threads)
        if late:
            for thread, (path, _) in zip(threads, paths, strict=True):
                if not thread.is_alive():
                    path.close()
            raise DeadlinePassed("the peer's device was not reached in time")
    return errors


class Transfer:
    """One plan, carried out over the paths of a connection. ``done`` is told of every range that is."""

    def __init__(
        self,
        fabric: Fabric,
        stream: RdmaStream,
        plan: Plan,
        done: Done,
        *,
        local_keys: Callable[[int], Keys],
        remote_keys: Callable[[Path], Keys],
    ) -> None:
        self._fabric = fabric
        self._stream = stream
        self._plan = plan
        self._done = done
        self._local_keys = local_keys
        self._remote_keys = remote_keys
        self._work = stripes.Work(len(plan))
        self.failure = ""

    def run(self, paths: Sequence[Path], spare: Sequence[Path], deadline: float) -> bool:
        """Whether all of it was carried out. Raises ``DeadlinePassed``, ``Disconnected``, or :class:`Refused`.

        However it ends, when it has, no device uses the memory of this batch any more. ``spare`` paths are used when
        all of ``paths`` have failed.
        """
        using = list(paths)
        waiting = list(spare)
        waiter = poll()
        waiter.register(self._stream.fileno(), POLLIN)
        by_fd = {path.pair.fd: path for path in using}
        for fd in by_fd:
            waiter.register(fd, POLLIN)
        patience = max(0.2, (deadline - time.monotonic()) * PATIENCE)
        try:
            while self._work or any(path.parts for path in using):
                if not using:
                    if not waiting:
                        return False
                    using.append(waiting.pop(0))
                    by_fd[using[0].pair.fd] = using[0]
                    waiter.register(using[0].pair.fd, POLLIN)
                now = time.monotonic()
                if now > deadline:
                    raise DeadlinePassed("the peer's memory was not read or written in time")
                self._hand_out(using)
                heard = False
                for path in list(using):
                    heard |= self._look(path, using, waiter, now, patience)
                if heard or _arm(using):
                    continue
                left = min(deadline - time.monotonic(), LOOK_AT_LINK)
                for fd, _ in waiter.poll(max(left, 0) * 1000):
                    if fd in by_fd:
                        by_fd[fd].woken()
                    else:
                        raise Disconnected("the peer closed the connection")
            return True
        finally:
            for path in using:
                if path.parts:
                    path.end()

    def _hand_out(self, using: list[Path]) -> None:
        if not self._work:
            return
        alone = len(using) == 1
        shares = [1.0] if alone else self._fabric.rates.shares([path.key for path in using])
        for path, share in zip(list(using), shares, strict=True):
            while self._work and (alone or len(path.parts) < 2):
                room = path.room()
                begin, end = self._work.first()
                left = sum(self._plan.bytes_of(*each) for each in self._work.ranges())
                most = max(1, path.pair.depth // 4)
                ends: list[int] = []
                at = begin
                while at < end and room > 0:
                    size = stripes.part_bytes(left, share, alone)
                    to = self._plan.cut(at, end, size, min(most, room))
                    ends.append(to)
                    room -= to - at
                    at = to
                    if not alone:
                        break
                if not ends:
                    break
                self._work.take(ends[-1])
                try:
                    path.post(self._plan, begin, ends, self._local_keys(path.adapter), self._remote_keys(path))
                except VerbsError as error:
                    self._failed(path, using, str(error))
                    break

    def _look(self, path: Path, using: list[Path], waiter: Any, now: float, patience: float) -> bool:
        """Take what has come in on a path; whether anything did."""
        before = path.heard
        try:
            done, wrong = path.completed()
        except VerbsError as error:
            self._failed(path, using, str(error), waiter)
            return True
        for part in done:
            size = self._plan.bytes_of(part.begin, part.end)
            self._fabric.rates.measured(path.key, size, path.heard - max(part.since, before))
            self._fabric.rests.worked(path.key)
            self._done(part.begin, part.end)
        if wrong is not None:
            why = f"{wrong.text} ({wrong.name})"
            self._failed(path, using, why, waiter, rest=wrong.fault in (Fault.PATH, Fault.FLUSHED))
            if wrong.fault in (Fault.PEER, Fault.OURS):
                raise Refused(why)
        elif path.link_is_down(now):
            self._failed(path, using, "its link is down", waiter)
        elif path.parts and now - path.heard > patience:
            self._failed(path, using, "nothing has come for too long", waiter)
        return bool(done) or wrong is not None

    def _failed(self, path: Path, using: list[Path], why: str, waiter: Any = None, *, rest: bool = True) -> None:
        """End a path, and give what it had back to the others."""
        left = list(path.parts)
        if waiter is not None:
            waiter.unregister(path.pair.fd)
        using.remove(path)
        path.end()
        for part in reversed(left):
            self._work.give_back(part.begin, part.end)
        self.failure = f"path {path.name}: {why}"
        now = time.monotonic()
        pause = self._fabric.rests.failed(path.key, now) if rest else 0.0
        self._stream.look_again = min(self._stream.look_again, now + pause)
        self._fabric.count(rdma_paths_failed=1)
        logger.warning("RDMA: %s; left alone for %.0f s", self.failure, pause)
