"""A reliable connection's queue pair, with a completion queue of its own and a descriptor to wait on.

One thread uses it at a time. Each has its own completion queue, so that waiting, failing and ending one never
touches another: a completion that is polled belongs to who polls it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import time
from select import POLLIN, poll
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import abi
from .abi import Pointer
from .verbs import Device, VerbsError, done, library, made, value

ACKNOWLEDGE_TIMEOUT = 14
"""4.096 µs << 14 = 67 ms, the usual value: shorter and a congested fabric looks dead."""
RETRIES = 6
"""Half a second in all until a silent peer is an error. 7, the most, means for ever on soft-RoCE."""
MOST_READS = 16
"""Reads under way on a queue pair: what fills a link at page sizes, and what most devices allow."""
FLUSH_WAIT = 0.5
"""Seconds for the device to give ended work requests back. Destroying a queue pair waits for them by itself."""

_POST = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, Pointer, Pointer)
_POLL = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, ctypes.c_int, Pointer)
_NOTIFY = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, ctypes.c_int)


class Endpoint(NamedTuple):
    """One end of a connection as the other needs it. ``mtu`` is the library's code; reads are most at a time."""

    gid: bytes
    lid: int
    number: int
    psn: int
    mtu: int
    ethernet: bool
    reads_served: int
    reads_asked: int


class QueuePair:
    """From construction until :meth:`close`; usable after :meth:`connect`."""

    def __init__(
        self, device: Device, port: int, gid_index: int, *, ethernet: bool, depth: int = 1, pieces: int = 1
    ) -> None:
        """``depth`` work requests of ``pieces`` extents each may be under way. Raises ``VerbsError``."""
        self.device, self.depth, self.pieces = device, depth, pieces
        self._port, self._gid_index, self._ethernet = port, gid_index, ethernet
        self._library = lib = library()
        self._channel = self._queue = self._pair = 0
        context = device.context
        state = device.port(port)
        gid = device.gid(port, gid_index)
        try:
            self._channel = made("no completion channel", lib.create_comp_channel(context))
            self.fd = value(self._channel + abi.CHANNEL_FD, ctypes.c_int)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_NONBLOCK)
            # Room for every request, though only some are signalled: when one fails, all after it complete.
            self._queue = made("no completion queue", lib.create_cq(context, depth + 1, None, self._channel, 0))
            wanted = abi.QueuePairInit(
                send_queue=self._queue,
                receive_queue=self._queue,
                capacity=abi.Capacity(depth, 1, pieces, 1, 0),
                kind=abi.RELIABLE_CONNECTION,
            )
            self._pair = made(f"no queue pair on {device.name}", lib.create_qp(device.domain, ctypes.byref(wanted)))
        except BaseException:
            self.close()
            raise
        self.psn = secrets.randbits(24)
        self.local = Endpoint(
            gid,
            state.lid,
            value(self._pair + abi.QUEUE_PAIR_NUMBER, ctypes.c_uint32),
            self.psn,
            state.mtu,
            ethernet,
            min(device.limits.reads_served, MOST_READS),
            min(device.limits.reads_asked, MOST_READS),
        )
        operations = [value(context + at, ctypes.c_uint64) for at in (abi.OPS_POST_SEND, abi.OPS_POLL_CQ)]
        self._post: Any = _POST(operations[0])
        self._poll_queue: Any = _POLL(operations[1])
        self._notify: Any = _NOTIFY(value(context + abi.OPS_REQ_NOTIFY_CQ, ctypes.c_uint64))
        self._completions = np.zeros(min(depth + 1, 64), abi.COMPLETION)
        self._completions_at = self._completions.ctypes.data
        self._bad = ctypes.c_uint64()
        self._bad_at = ctypes.addressof(self._bad)
        self._event = (ctypes.c_void_p(), ctypes.c_void_p())

    def connect(self, remote: Endpoint, *, access: int = 0) -> None:
        """Bind both ends together; ``access`` is what the other side may do to our regions. Raises ``VerbsError``."""
        a = abi.QueuePairAttributes(state=abi.STATE_INIT, port=self._port, access=access)
        self._modify(a, abi.ATTR_STATE | abi.ATTR_PARTITION | abi.ATTR_PORT | abi.ATTR_ACCESS)
        a = abi.QueuePairAttributes(
            state=abi.STATE_READY_TO_RECEIVE,
            path_mtu=min(self.local.mtu, remote.mtu),
            destination=remote.number,
            receive_psn=remote.psn,
            reads_served=min(self.local.reads_served, remote.reads_asked),
            receiver_timer=12,
        )
        a.address.port, a.address.lid = self._port, remote.lid
        if self._ethernet or not remote.lid:
            a.address.is_global = 1
            a.address.route.gid[:] = [int.from_bytes(remote.gid[at : at + 8], "little") for at in (0, 8)]
            a.address.route.gid_index, a.address.route.hop_limit = self._gid_index, 64
        self._modify(
            a,
            abi.ATTR_STATE
            | abi.ATTR_ADDRESS
            | abi.ATTR_PATH_MTU
            | abi.ATTR_DESTINATION
            | abi.ATTR_RECEIVE_PSN
            | abi.ATTR_READS_SERVED
            | abi.ATTR_RECEIVER_TIMER,
        )
        a = abi.QueuePairAttributes(
            state=abi.STATE_READY_TO_SEND,
            send_psn=self.psn,
            timeout=ACKNOWLEDGE_TIMEOUT,
            retries=RETRIES,
            receiver_retries=7,
            reads_asked=min(self.local.reads_asked, remote.reads_served),
        )
        self._modify(
            a,
            abi.ATTR_STATE
            | abi.ATTR_TIMEOUT
            | abi.ATTR_RETRIES
            | abi.ATTR_RECEIVER_RETRIES
            | abi.ATTR_READS_ASKED
            | abi.ATTR_SEND_PSN,
        )

    def post(self, first: int) -> None:
        """Hand a chain of work requests over, by the address of its first. Raises ``VerbsError``."""
        result = self._post(self._pair, first, self._bad_at)
        if result:
            raise VerbsError(f"{self.device.name} takes no work request", abs(result))

    def collect(self) -> NDArray[Any]:
        """Completions that are there, at most 64, as records that stay valid until the next call."""
        count = self._poll_queue(self._queue, len(self._completions), self._completions_at)
        if count < 0:
            raise VerbsError(f"the completion queue of {self.device.name} fails", abs(count))
        return self._completions[:count]

    def arm(self) -> None:
        """Make the next completion readable at ``fd``. Look with :meth:`collect` after: it may have come before."""
        done("no notification of completions", self._notify(self._queue, 0))

    def take_event(self) -> None:
        """What made ``fd`` readable is seen."""
        queue, context = self._event
        while self._library.get_cq_event(self._channel, ctypes.byref(queue), ctypes.byref(context)) == 0:
            self._library.ack_cq_events(queue, 1)

    def port_is_active(self) -> bool:
        """Whether the link is up, as far as the device knows."""
        try:
            return self.device.port(self._port).active
        except VerbsError:
            return False

    def flush(self, last: int) -> bool:
        """End everything under way. ``last`` is the id of the work request posted last, which is given back last.

        From then on neither side's device touches memory for this queue pair. False when the device does not give it
        back in time; :meth:`close` still waits for it.
        """
        a = abi.QueuePairAttributes(state=abi.STATE_ERROR)
        until = time.monotonic() + FLUSH_WAIT
        waiter = poll()
        waiter.register(self.fd, POLLIN)
        try:
            self._modify(a, abi.ATTR_STATE)
            while True:
                self.arm()
                while len(completions := self.collect()):
                    if (completions["id"] == last).any():
                        return True
                left = until - time.monotonic()
                if left <= 0:
                    return False
                waiter.poll(left * 1000)
                self.take_event()
        except VerbsError:
            return False

    def close(self) -> None:
        """Destroy it: the library returns when the device has let go of it. Safe to call again."""
        lib = self._library
        pair, self._pair = self._pair, 0
        queue, self._queue = self._queue, 0
        channel, self._channel = self._channel, 0
        if pair:
            done("a queue pair cannot be destroyed", lib.destroy_qp(pair))
        if queue:
            lib.destroy_cq(queue)
        if channel:
            lib.destroy_comp_channel(channel)

    def _modify(self, attributes: abi.QueuePairAttributes, mask: int) -> None:
        result = self._library.modify_qp(self._pair, ctypes.byref(attributes), mask)
        done(f"a queue pair of {self.device.name} cannot change its state", result)
