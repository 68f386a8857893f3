"""The binary interface of libibverbs, as far as pages need it: structures, constants, records of work requests.

Part of the library's promise of compatibility since rdma-core 1.1 (``IBVERBS_1.1``); only 64-bit little-endian hosts.
Work requests, scatter/gather entries and completions are numpy records, so that a batch is filled by columns and handed
over as one address.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

Pointer = ctypes.c_void_p
_u8, _u16, _u32, _u64, _int = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int

# Where the library keeps what it lets callers reach only through inline functions of its header.
CONTEXT_OPS: Final = 8
OPS_POLL_CQ: Final = CONTEXT_OPS + 88
OPS_REQ_NOTIFY_CQ: Final = CONTEXT_OPS + 96
OPS_POST_SEND: Final = CONTEXT_OPS + 200
CHANNEL_FD: Final = 8
REGION_LKEY: Final = 36
REGION_RKEY: Final = 40
QUEUE_PAIR_NUMBER: Final = 52

LOCAL_WRITE: Final = 1
REMOTE_WRITE: Final = 2
REMOTE_READ: Final = 4

OP_WRITE: Final = 0
OP_READ: Final = 4
SIGNALED: Final = 2

RELIABLE_CONNECTION: Final = 2
STATE_RESET, STATE_INIT, STATE_READY_TO_RECEIVE, STATE_READY_TO_SEND = 0, 1, 2, 3
STATE_ERROR: Final = 6

ATTR_STATE: Final = 1 << 0
ATTR_ACCESS: Final = 1 << 3
ATTR_PARTITION: Final = 1 << 4
ATTR_PORT: Final = 1 << 5
ATTR_ADDRESS: Final = 1 << 7
ATTR_PATH_MTU: Final = 1 << 8
ATTR_TIMEOUT: Final = 1 << 9
ATTR_RETRIES: Final = 1 << 10
ATTR_RECEIVER_RETRIES: Final = 1 << 11
ATTR_RECEIVE_PSN: Final = 1 << 12
ATTR_READS_ASKED: Final = 1 << 13
ATTR_RECEIVER_TIMER: Final = 1 << 15
ATTR_SEND_PSN: Final = 1 << 16
ATTR_READS_SERVED: Final = 1 << 17
ATTR_DESTINATION: Final = 1 << 20

PORT_ACTIVE: Final = 4
GID_BYTES: Final = 16

WORK = np.dtype(
    {
        "names": ["id", "next", "pieces", "count", "op", "flags", "remote", "rkey"],
        "formats": ["<u8", "<u8", "<u8", "<i4", "<i4", "<u4", "<u8", "<u4"],
        "offsets": [0, 8, 16, 24, 28, 32, 40, 48],
        "itemsize": 128,
    }
)
"""``ibv_send_wr``"""

PIECE = np.dtype([("address", "<u8"), ("length", "<u4"), ("lkey", "<u4")])
"""``ibv_sge``"""

COMPLETION = np.dtype(
    {
        "names": ["id", "status", "op", "vendor", "bytes", "number"],
        "formats": ["<u8", "<i4", "<i4", "<u4", "<u4", "<u4"],
        "offsets": [0, 8, 12, 16, 20, 28],
        "itemsize": 48,
    }
)
"""``ibv_wc``; of one with an error only id, status, vendor and number mean something."""


class Capacity(ctypes.Structure):
    """``ibv_qp_cap``"""

    _fields_ = [(name, _u32) for name in ("send_work", "receive_work", "send_pieces", "receive_pieces", "inline")]


class QueuePairInit(ctypes.Structure):
    """``ibv_qp_init_attr``"""

    _fields_ = [
        ("context", Pointer),
        ("send_queue", Pointer),
        ("receive_queue", Pointer),
        ("shared_receive_queue", Pointer),
        ("capacity", Capacity),
        ("kind", _int),
        ("signal_all", _int),
    ]


class GlobalRoute(ctypes.Structure):
    """``ibv_global_route``"""

    _fields_ = [
        ("gid", _u64 * 2),  # of its type, for its alignment
        ("flow_label", _u32),
        ("gid_index", _u8),
        ("hop_limit", _u8),
        ("traffic_class", _u8),
    ]


class AddressHandle(ctypes.Structure):
    """``ibv_ah_attr``"""

    _fields_ = [
        ("route", GlobalRoute),
        ("lid", _u16),
        ("service_level", _u8),
        ("path_bits", _u8),
        ("rate", _u8),
        ("is_global", _u8),
        ("port", _u8),
    ]


class QueuePairAttributes(ctypes.Structure):
    """``ibv_qp_attr``"""

    _fields_ = [
        ("state", _int),
        ("current_state", _int),
        ("path_mtu", _int),
        ("migration", _int),
        ("queue_key", _u32),
        ("receive_psn", _u32),
        ("send_psn", _u32),
        ("destination", _u32),
        ("access", ctypes.c_uint),
        ("capacity", Capacity),
        ("address", AddressHandle),
        ("other_address", AddressHandle),
        ("partition_index", _u16),
        ("other_partition_index", _u16),
        ("notify_drained", _u8),
        ("draining", _u8),
        ("reads_asked", _u8),
        ("reads_served", _u8),
        ("receiver_timer", _u8),
        ("port", _u8),
        ("timeout", _u8),
        ("retries", _u8),
        ("receiver_retries", _u8),
        ("other_port", _u8),
        ("other_timeout", _u8),
        ("rate_limit", _u32),
    ]


class DeviceAttributes(ctypes.Structure):
    """``ibv_device_attr``"""

    _fields_ = [
        ("firmware", ctypes.c_char * 64),
        ("node_guid", _u64),
        ("system_guid", _u64),
        ("max_region_bytes", _u64),
        ("page_sizes", _u64),
        ("vendor", _u32),
        ("part", _u32),
        ("revision", _u32),
        ("max_queue_pairs", _int),
        ("max_work", _int),
        ("capabilities", ctypes.c_uint),
        ("max_pieces", _int),
        ("max_read_pieces", _int),
        ("max_completion_queues", _int),
        ("max_completions", _int),
        ("max_regions", _int),
        ("max_domains", _int),
        ("max_reads_served", _int),
        ("max_ee_reads", _int),
        ("max_resources", _int),
        ("max_reads_asked", _int),
        ("rest", _u8 * 72),
    ]


class PortAttributes(ctypes.Structure):
    """``ibv_port_attr``"""

    _fields_ = [
        ("state", _int),
        ("max_mtu", _int),
        ("active_mtu", _int),
        ("gid_count", _int),
        ("capabilities", _u32),
        ("max_message", _u32),
        ("bad_keys", _u32),
        ("queue_key_violations", _u32),
        ("partition_count", _u16),
        ("lid", _u16),
        ("rest", _u8 * 16),
    ]


SIZES: Final = {
    QueuePairInit: 64,
    GlobalRoute: 24,
    AddressHandle: 32,
    QueuePairAttributes: 144,
    DeviceAttributes: 232,
    PortAttributes: 52,
}
"""What the C compiler says; a test compares."""
