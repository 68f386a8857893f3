"""libibverbs without a build step: devices, protection domains, memory regions, called through ctypes.

Why not pyverbs: it holds the interpreter's lock in the calls that post, poll and wait, builds a Python object for every
work request (5 to 10 µs a page), and cannot be installed beside a libibverbs that is not exactly its own. Here the lock
is released in every call, and a batch of work requests is one numpy array. The tests compare what both say about a
device wherever pyverbs is installed.

Importing this module loads nothing; :func:`library` does, once.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from hicache_mooncake.errors import Unavailable

from . import abi
from .abi import Pointer

LIBRARY = "libibverbs.so.1"
INSTALL = "install rdma-core (Debian: libibverbs1 ibverbs-providers; RHEL: libibverbs), in the container too"

_int, _u8 = ctypes.c_int, ctypes.c_uint8


class VerbsError(Unavailable):
    """A call of the library failed. ``errno`` says how, 0 where the library does not."""

    def __init__(self, what: str, errno: int, *, hint: str = "") -> None:
        super().__init__(f"{what}: {os.strerror(errno)}" if errno else what, hint=hint)
        self.errno = errno


class Library:
    """The functions that are used, with their types. Raises ``Unavailable`` where the library is not installed."""

    def __init__(self) -> None:
        if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise Unavailable(f"RDMA is not supported on {platform.machine()}: 64-bit little-endian hosts only")
        try:
            self._library = ctypes.CDLL(LIBRARY, use_errno=True)
        except OSError as error:
            raise Unavailable(f"{LIBRARY} cannot be loaded: {error}", hint=INSTALL) from error
        function = self._function
        self.get_device_list = function("ibv_get_device_list", ctypes.POINTER(Pointer), ctypes.POINTER(_int))
        self.free_device_list = function("ibv_free_device_list", None, ctypes.POINTER(Pointer))
        self.get_device_name = function("ibv_get_device_name", ctypes.c_char_p, Pointer)
        self.open_device = function("ibv_open_device", Pointer, Pointer)
        self.close_device = function("ibv_close_device", _int, Pointer)
        self.query_device = function("ibv_query_device", _int, Pointer, Pointer)
        self.query_port = function("ibv_query_port", _int, Pointer, _u8, Pointer)
        self.query_gid = function("ibv_query_gid", _int, Pointer, _u8, _int, Pointer)
        self.alloc_pd = function("ibv_alloc_pd", Pointer, Pointer)
        self.dealloc_pd = function("ibv_dealloc_pd", _int, Pointer)
        self.reg_mr = function("ibv_reg_mr", Pointer, Pointer, Pointer, ctypes.c_size_t, _int)
        self.dereg_mr = function("ibv_dereg_mr", _int, Pointer)
        self.create_comp_channel = function("ibv_create_comp_channel", Pointer, Pointer)
        self.destroy_comp_channel = function("ibv_destroy_comp_channel", _int, Pointer)
        self.create_cq = function("ibv_create_cq", Pointer, Pointer, _int, Pointer, Pointer, _int)
        self.destroy_cq = function("ibv_destroy_cq", _int, Pointer)
        self.get_cq_event = function("ibv_get_cq_event", _int, Pointer, Pointer, Pointer)
        self.ack_cq_events = function("ibv_ack_cq_events", None, Pointer, ctypes.c_uint)
        self.create_qp = function("ibv_create_qp", Pointer, Pointer, Pointer)
        self.modify_qp = function("ibv_modify_qp", _int, Pointer, Pointer, _int)
        self.destroy_qp = function("ibv_destroy_qp", _int, Pointer)

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, arguments
        return function  # type: ignore[no-any-return]


@cache
def library() -> Library:
    """The library, loaded on first use. Raises ``Unavailable``."""
    return Library()


def made(what: str, pointer: int | None, *, hint: str = "") -> int:
    """A pointer that the library returned. Raises :class:`VerbsError` when it is null."""
    if not pointer:
        raise VerbsError(what, ctypes.get_errno(), hint=hint)
    return pointer


def done(what: str, result: int) -> None:
    """Check a call that returns 0 or an errno. Raises :class:`VerbsError`."""
    if result:
        raise VerbsError(what, result if result > 0 else ctypes.get_errno())


def value(address: int, kind: Any) -> int:
    """A number in one of the library's structures."""
    number: int = kind.from_address(address).value
    return number


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device can do, in the library's terms."""

    region_bytes: int
    work: int
    pieces: int
    read_pieces: int
    completions: int
    reads_served: int
    reads_asked: int


@dataclass(frozen=True, slots=True)
class PortState:
    """A port as it is now. ``mtu`` is the library's code: 1 is 256 bytes, 5 is 4096."""

    active: bool
    mtu: int
    lid: int
    max_message: int


class Device:
    """An open device with one protection domain. Close it after everything made on it."""

    def __init__(self, name: str) -> None:
        """Raises ``Unavailable`` when it cannot be opened."""
        self.name = name
        self._library = lib = library()
        self._lock = threading.Lock()
        self.context = _open(lib, name)
        try:
            raw = abi.DeviceAttributes()
            done(f"device {name} cannot be queried", lib.query_device(self.context, ctypes.byref(raw)))
            self.domain = made(f"device {name} gives no protection domain", lib.alloc_pd(self.context))
        except BaseException:
            lib.close_device(self.context)
            raise
        self.limits = Limits(
            raw.max_region_bytes,
            raw.max_work,
            raw.max_pieces,
            raw.max_read_pieces or raw.max_pieces,
            raw.max_completions,
            raw.max_reads_served,
            raw.max_reads_asked,
        )

    def port(self, number: int) -> PortState:
        """The state of a port, now. Raises ``VerbsError``."""
        raw = abi.PortAttributes()
        done(f"port {number} of {self.name}", self._library.query_port(self.context, number, ctypes.byref(raw)))
        return PortState(raw.state == abi.PORT_ACTIVE, raw.active_mtu, raw.lid, raw.max_message)

    def gid(self, port: int, index: int) -> bytes:
        """An entry of a port's table of addresses. Raises ``VerbsError``."""
        raw = (ctypes.c_uint8 * abi.GID_BYTES)()
        done(f"GID {index} of {self.name}", self._library.query_gid(self.context, port, index, raw))
        return bytes(raw)

    def register(self, address: int, length: int, access: int) -> Region:
        """Let the device use memory. Takes a second for some GiB. Raises ``VerbsError``."""
        return Region(self, address, length, access)

    def close(self) -> None:
        """Give the device back. Safe to call again."""
        with self._lock:
            if self.context:
                self._library.dealloc_pd(self.domain)
                self._library.close_device(self.context)
                self.context = self.domain = 0


class Region:
    """Memory that a device may use, by ``lkey`` for ourselves and by ``rkey`` for peers, until :meth:`close`."""

    def __init__(self, device: Device, address: int, length: int, access: int) -> None:
        lib = library()
        pointer = lib.reg_mr(device.domain, address, length, access)
        what = f"{length >> 20} MiB cannot be registered with {device.name}"
        self._pointer = made(what, pointer, hint="see `hicache-mooncake doctor`: memlock, and the device's limits")
        self.lkey = value(self._pointer + abi.REGION_LKEY, ctypes.c_uint32)
        self.rkey = value(self._pointer + abi.REGION_RKEY, ctypes.c_uint32)

    def close(self) -> None:
        """The device does not use the memory from here on. Safe to call again. Raises ``VerbsError``."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            done("a memory region cannot be deregistered", library().dereg_mr(pointer))


def device_names() -> list[str]:
    """Devices that the library can open. Raises ``Unavailable`` without the library; empty without a device."""
    lib = library()
    count = ctypes.c_int()
    devices = lib.get_device_list(ctypes.byref(count))
    if not devices:
        return []  # no RDMA in the kernel
    try:
        return [lib.get_device_name(devices[at]).decode() for at in range(count.value)]
    finally:
        lib.free_device_list(devices)


def _open(lib: Library, name: str) -> int:
    count = ctypes.c_int()
    devices = lib.get_device_list(ctypes.byref(count))
    if not devices:
        raise VerbsError(f"device {name} cannot be opened: there is no RDMA on this host", 0)
    try:
        for at in range(count.value):
            if lib.get_device_name(devices[at]) == name.encode():
                hint = f"is /dev/infiniband in the container, and this user allowed to use it? {INSTALL}"
                return made(f"device {name} cannot be opened", lib.open_device(devices[at]), hint=hint)
        raise VerbsError(f"device {name} is not known to {LIBRARY}", 0, hint=INSTALL)
    finally:
        lib.free_device_list(devices)
