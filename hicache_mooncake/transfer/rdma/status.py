"""What a completion's status means, and what there is to do about it. Pure.

Numbers and names are libibverbs' ``ibv_wc_status``; who is at fault follows the InfiniBand specification, volume 1,
11.6.2 and 9.9.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple


class Fault(Enum):
    """Where the cause of a failed work request lies, and so who else can be asked."""

    NONE = auto()
    OURS = auto()
    """A wrong request or local key: the same request fails on any path. A bug or a region that went away here."""
    PEER = auto()
    """The peer does not let us: region gone, key stale, restarted. Another path to it fails as well."""
    PATH = auto()
    """Nothing came back: link down, peer killed, unreachable. Another NIC, or another replica, may work."""
    FLUSHED = auto()
    """Never carried out, because a request before it failed or the queue pair was ended."""


class Meaning(NamedTuple):
    """A status for people and for the code."""

    name: str
    fault: Fault
    text: str


MEANINGS: Final[dict[int, Meaning]] = {
    0: Meaning("SUCCESS", Fault.NONE, "done"),
    1: Meaning("LOC_LEN_ERR", Fault.OURS, "a message longer than the port takes"),
    2: Meaning("LOC_QP_OP_ERR", Fault.OURS, "the request does not fit the queue pair"),
    3: Meaning("LOC_EEC_OP_ERR", Fault.OURS, "a local end-to-end context is wrong"),
    4: Meaning("LOC_PROT_ERR", Fault.OURS, "the local memory is not registered, or not for writing"),
    5: Meaning("WR_FLUSH_ERR", Fault.FLUSHED, "not carried out: the queue pair is in its error state"),
    6: Meaning("MW_BIND_ERR", Fault.OURS, "a memory window could not be bound"),
    7: Meaning("BAD_RESP_ERR", Fault.PATH, "the peer's answer makes no sense"),
    8: Meaning("LOC_ACCESS_ERR", Fault.OURS, "the local memory may not be written by the device"),
    9: Meaning("REM_INV_REQ_ERR", Fault.PEER, "the peer's queue pair takes no such request"),
    10: Meaning("REM_ACCESS_ERR", Fault.PEER, "the peer's region is gone, or its key is stale"),
    11: Meaning("REM_OP_ERR", Fault.PEER, "the peer could not carry the request out"),
    12: Meaning("RETRY_EXC_ERR", Fault.PATH, "the peer does not acknowledge: it is gone, or a link is down"),
    13: Meaning("RNR_RETRY_EXC_ERR", Fault.PEER, "the peer is never ready to receive"),
    14: Meaning("LOC_RDD_VIOL_ERR", Fault.OURS, "a local reliable datagram domain is wrong"),
    15: Meaning("REM_INV_RD_REQ_ERR", Fault.PEER, "the peer refuses a reliable datagram request"),
    16: Meaning("REM_ABORT_ERR", Fault.PEER, "the peer aborted the operation"),
    17: Meaning("INV_EECN_ERR", Fault.OURS, "no such end-to-end context"),
    18: Meaning("INV_EEC_STATE_ERR", Fault.OURS, "an end-to-end context is in the wrong state"),
    19: Meaning("FATAL_ERR", Fault.PATH, "the local device has failed"),
    20: Meaning("RESP_TIMEOUT_ERR", Fault.PATH, "the peer did not respond in time"),
    21: Meaning("GENERAL_ERR", Fault.PATH, "the local device reports an error without a kind"),
    22: Meaning("TM_ERR", Fault.OURS, "tag matching failed"),
    23: Meaning("TM_RNDV_INCOMPLETE", Fault.OURS, "a tag matching rendezvous is incomplete"),
}


def meaning(status: int) -> Meaning:
    """What a status means; one that is newer than this table is the path's fault.

    >>> meaning(10).name, meaning(10).fault
    ('REM_ACCESS_ERR', <Fault.PEER: 3>)
    >>> meaning(99).fault
    <Fault.PATH: 4>
    """
    return MEANINGS.get(status) or Meaning(f"status {status}", Fault.PATH, "a status that is not known here")
