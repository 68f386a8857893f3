"""The few error types of this package. The type says whose fault it is; the hint says what to do."""

from __future__ import annotations


class HiCacheMooncakeError(Exception):
    """Base of every error raised on purpose by this package.

    ``hint`` names the setting or the command that helps; it is part of ``str()``.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class ConfigError(HiCacheMooncakeError):
    """The operator's settings cannot work. Raised at start, before anything is allocated.

    ``field`` is the setting's name, ``value`` what was given (never a secret), ``allowed`` what would be accepted.
    """

    def __init__(self, field: str, value: object, allowed: str, *, hint: str = "") -> None:
        super().__init__(f"setting {field!r} = {value!r} is refused: {allowed}", hint=hint)
        self.field = field
        self.value = value
        self.allowed = allowed


class Unavailable(HiCacheMooncakeError):
    """A part of the pool (Redis, a node, a peer) could not be reached or did not answer in time.

    The environment's fault, and transient: callers turn it into counted misses and try again later.
    """


class ProtocolError(HiCacheMooncakeError):
    """The other side sent what it must not: a malformed frame, another version, a failed proof of the secret.

    The connection it came from is torn down; nothing that came over it is used.
    """
