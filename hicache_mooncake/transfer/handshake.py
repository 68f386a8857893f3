"""Who may talk to whom, settled before the first request. State machines without I/O: bytes in, bytes out.

::

    reader                                        listener
    HELLO  versions, pool, node id, nonce   --->
                                            <---  CHALLENGE  version, nonce
    PROOF  HMAC(secret, "reader", all above) --->
                                            <---  WELCOME  HMAC(secret, "listener", all above)

Either answer of the listener may be a REFUSAL with a reason instead. Both proofs cover everything that was
said, under both sides' fresh nonces, so a proof cannot be replayed, reflected, or used for another pool or
node. The reader proves first: whoever connects to a data port learns nothing to guess the secret with. Pool
and node id are compared after the proof, so that a stranger cannot probe them.

No secret on both sides is a secret like any other (the empty one): two sides match only if both have none.
What follows the handshake is neither encrypted nor authenticated; the data port belongs on a trusted network.

The node id names one process start. A process that took a dead node's port has another id and refuses.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, IntEnum, auto
from typing import Final

from ..errors import HiCacheMooncakeError, ProtocolError, Unavailable
from .base import Credentials
from .wire import HEADER_SIZE, Kind, decode_header, encode_frame

LOWEST_VERSION: Final = 1
HIGHEST_VERSION: Final = 1

MAX_FRAME_BYTES: Final = 1024
"""Payload of a handshake frame: two names and a nonce. All that a stranger can make a listener buffer."""
MAX_NAME_BYTES: Final = 255
"""Pool names and node ids."""
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = hashlib.sha256().digest_size

_HELLO = struct.Struct(f"<HHHH{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<H{_NONCE_BYTES}s")


class Refusal(IntEnum):
    """Why a listener does not serve this reader."""

    MALFORMED = 1
    VERSION = 2
    SECRET = 3
    POOL = 4
    NODE = 5
    BUSY = 6


_REASONS: Final = {
    Refusal.MALFORMED: "it did not understand us",
    Refusal.VERSION: f"it speaks no version in {LOWEST_VERSION} to {HIGHEST_VERSION} of the page protocol",
    Refusal.SECRET: "it has another secret, or one side has none",
    Refusal.POOL: "it belongs to another pool",
    Refusal.NODE: "another node has taken its address",
    Refusal.BUSY: "it has all the connections it allows",
}


class AnotherNode(ProtocolError):
    """Who answers is not the node that was looked for, which has ended therefore."""


class _State(Enum):
    AWAIT_HELLO = auto()
    AWAIT_CHALLENGE = auto()
    AWAIT_PROOF = auto()
    AWAIT_WELCOME = auto()
    DONE = auto()
    REFUSED = auto()


_EXPECTED: Final[dict[_State, Sequence[Kind]]] = {
    _State.AWAIT_HELLO: (Kind.HELLO,),
    _State.AWAIT_CHALLENGE: (Kind.CHALLENGE, Kind.REFUSAL),
    _State.AWAIT_PROOF: (Kind.PROOF,),
    _State.AWAIT_WELCOME: (Kind.WELCOME, Kind.REFUSAL),
}


class _Handshake(ABC):
    """What both sides share: collecting frames, the transcript, the proofs.

    Feed what arrives to :meth:`feed`, never more than :attr:`wanted` bytes, and send what it returns, until
    :attr:`done`, or :attr:`error` says why there is no agreement (after sending what was returned).
    """

    def __init__(self, state: _State, credentials: Credentials) -> None:
        self._state = state
        self._key = hashlib.sha256(b"hicache-mooncake page protocol\0" + credentials.secret).digest()
        self._transcript = hashlib.sha256()
        self._buffer = bytearray()
        self.error: HiCacheMooncakeError | None = None

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def wanted(self) -> int:
        """How many bytes complete the header or the frame that is being received; 0 when it is over."""
        if self._state not in _EXPECTED:
            return 0
        if len(self._buffer) < HEADER_SIZE:
            return HEADER_SIZE - len(self._buffer)
        return HEADER_SIZE + self._header()[1] - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Take bytes in, in pieces of any size; returns bytes to send."""
        out = b""
        position = 0
        while position < len(data):
            try:
                wanted = self.wanted
                if wanted == 0:
                    raise ProtocolError("bytes came before the handshake was over")
                self._buffer += data[position : position + wanted]
                position += wanted
                if len(self._buffer) >= HEADER_SIZE and self.wanted == 0:
                    out += self._complete()
            except ProtocolError as error:
                return out + self._refuse(Refusal.MALFORMED, error)
        return out

    def _complete(self) -> bytes:
        kind, _ = self._header()
        frame = bytes(self._buffer)
        self._buffer.clear()
        return self._receive(kind, frame, frame[HEADER_SIZE:])

    def _header(self) -> tuple[Kind, int]:
        return decode_header(self._buffer[:HEADER_SIZE], _EXPECTED[self._state], MAX_FRAME_BYTES)

    def _proof(self, role: bytes) -> bytes:
        return hmac.digest(self._key, role + b"\0" + self._transcript.digest(), "sha256")

    @abstractmethod
    def _receive(self, kind: Kind, frame: bytes, payload: bytes) -> bytes:
        """Handle one whole frame of a kind that the state allows; returns bytes to send."""

    @abstractmethod
    def _refuse(self, refusal: Refusal, error: HiCacheMooncakeError) -> bytes:
        """End without agreement; returns bytes to send."""


class ReaderHandshake(_Handshake):
    """The side that connects. ``node_id`` is who must answer. Send :meth:`begin` first."""

    def __init__(self, credentials: Credentials, node_id: str, *, nonce: bytes | None = None) -> None:
        super().__init__(_State.AWAIT_CHALLENGE, credentials)
        pool, node = _name(credentials.pool), _name(node_id)
        self._node_id = node_id
        fixed = _HELLO.pack(LOWEST_VERSION, HIGHEST_VERSION, len(pool), len(node), nonce or os.urandom(_NONCE_BYTES))
        self._hello = encode_frame(Kind.HELLO, fixed + pool + node)
        self._transcript.update(self._hello)
        self.version = 0

    def begin(self) -> bytes:
        return self._hello

    def _receive(self, kind: Kind, frame: bytes, payload: bytes) -> bytes:
        if kind is Kind.REFUSAL:
            return self._refused(payload)
        if kind is Kind.CHALLENGE:
            if len(payload) != _CHALLENGE.size:
                raise ProtocolError("a challenge of the wrong size")
            self.version, _ = _CHALLENGE.unpack(payload)
            if not LOWEST_VERSION <= self.version <= HIGHEST_VERSION:
                raise ProtocolError(f"the listener chose version {self.version}, which was not offered")
            self._transcript.update(frame)
            proof = encode_frame(Kind.PROOF, self._proof(b"reader"))
            self._transcript.update(proof)
            self._state = _State.AWAIT_WELCOME
            return proof
        if not hmac.compare_digest(payload, self._proof(b"listener")):
            raise ProtocolError("the listener does not know the pool's secret")
        self._state = _State.DONE
        return b""

    def _refused(self, payload: bytes) -> bytes:
        try:
            refusal = Refusal(payload[0])
        except (IndexError, ValueError):
            raise ProtocolError("the listener refused without a known reason") from None
        text = f"the listener refuses us: {_REASONS[refusal]}"
        kind = {Refusal.BUSY: Unavailable, Refusal.NODE: AnotherNode}.get(refusal, ProtocolError)
        return self._refuse(refusal, kind(text))

    def _refuse(self, refusal: Refusal, error: HiCacheMooncakeError) -> bytes:
        self._state, self.error = _State.REFUSED, error
        return b""


class ListenerHandshake(_Handshake):
    """The side that listens, as node ``node_id``."""

    def __init__(self, credentials: Credentials, node_id: str, *, nonce: bytes | None = None) -> None:
        super().__init__(_State.AWAIT_HELLO, credentials)
        self._pool = _name(credentials.pool)
        self._node_id = _name(node_id)
        self._nonce = nonce or os.urandom(_NONCE_BYTES)
        self._asked_pool = self._asked_node = b""

    def _receive(self, kind: Kind, frame: bytes, payload: bytes) -> bytes:
        self._transcript.update(frame if kind is Kind.HELLO else b"")
        if kind is Kind.HELLO:
            if len(payload) < _HELLO.size:
                raise ProtocolError("a hello that is cut short")
            lowest, highest, pool_bytes, node_bytes, _ = _HELLO.unpack_from(payload)
            names = payload[_HELLO.size :]
            if len(names) != pool_bytes + node_bytes:
                raise ProtocolError("the lengths in a hello do not add up")
            self._asked_pool, self._asked_node = names[:pool_bytes], names[pool_bytes:]
            version = min(highest, HIGHEST_VERSION)
            if version < max(lowest, LOWEST_VERSION):
                text = f"the reader speaks versions {lowest} to {highest} of the page protocol"
                return self._refuse(Refusal.VERSION, ProtocolError(text))
            challenge = encode_frame(Kind.CHALLENGE, _CHALLENGE.pack(version, self._nonce))
            self._transcript.update(challenge)
            self._state = _State.AWAIT_PROOF
            return challenge
        if not hmac.compare_digest(payload, self._proof(b"reader")):
            return self._refuse(Refusal.SECRET, ProtocolError("the reader does not know the pool's secret"))
        if self._asked_pool != self._pool:
            return self._refuse(Refusal.POOL, ProtocolError("the reader looks for another pool"))
        if self._asked_node != self._node_id:
            return self._refuse(Refusal.NODE, ProtocolError("the reader looks for another node"))
        self._transcript.update(frame)
        self._state = _State.DONE
        return encode_frame(Kind.WELCOME, self._proof(b"listener"))

    def _refuse(self, refusal: Refusal, error: HiCacheMooncakeError) -> bytes:
        self._state, self.error = _State.REFUSED, error
        return refusal_frame(refusal)


def refusal_frame(refusal: Refusal) -> bytes:
    """What a listener sends instead of an answer."""
    return encode_frame(Kind.REFUSAL, bytes([refusal]))


def _name(text: str) -> bytes:
    encoded = text.encode()
    if not 0 < len(encoded) <= MAX_NAME_BYTES:
        raise ValueError(f"a pool name or node id has 1 to {MAX_NAME_BYTES} bytes, not {len(encoded)}")
    return encoded
