"""What prefill and decode cost on a machine: a model of a few coefficients, its files, its fit.

The seconds of one forward pass are linear in what it does (Mooncake, FAST'25, predicts prefill from length and prefix
hit the same way):

- prefill of ``new`` tokens behind ``prefix`` cached ones: ``per_token`` for the matrix products, ``per_pair`` for each
  pair of a new token and a token it attends to;
- one decode step: ``decode_base`` (reading the weights), ``decode_per_sequence``, ``decode_per_token`` of context;
- ``pass_base`` once a forward pass with prefill in it.

Profiles are TOML files in ``profiles/``, each with its source.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_mooncake.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DIRECTORY = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Profile:
    """A model on a machine. Seconds, bytes, tokens; ``source`` says where the figures come from.

    ``kv_bytes_per_token`` is the model's, all ranks together. ``load_bytes_per_s`` is how fast KV comes from host
    memory to the device, which overlaps with computing layer by layer: a pass takes the longer of the two.
    ``chunk_tokens`` is SGLang's ``--chunked-prefill-size``. ``device_tokens`` and ``host_tokens`` are the capacities of
    L1 and L2 where the figures were taken; they are defaults.
    """

    name: str
    source: str
    kv_bytes_per_token: int
    per_token: float
    per_pair: float
    pass_base: float = 0.0
    decode_base: float = 0.0
    decode_per_sequence: float = 0.0
    decode_per_token: float = 0.0
    load_bytes_per_s: float = 20e9
    chunk_tokens: int = 8192
    device_tokens: int = 100_000
    host_tokens: int = 200_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value < 1e18:
                raise ConfigError(f"{self.name}: {field.name}", value, "figures are not negative")
        for name in ("kv_bytes_per_token", "load_bytes_per_s", "chunk_tokens", "device_tokens"):
            if not getattr(self, name):
                raise ConfigError(f"{self.name}: {name}", 0, "must be positive")

    def prefill(self, new: int, prefix: int) -> float:
        """Seconds that ``new`` tokens behind ``prefix`` cached ones add to a pass."""
        return self.per_token * new + self.per_pair * new * (prefix + (new + 1) / 2)

    def chunked_prefill(self, new: int, prefix: int) -> float:
        """Seconds of a prefill that has the device to itself, in chunks."""
        return self.pass_base * -(-new // self.chunk_tokens) + self.prefill(new, prefix)

    def load(self, tokens: int) -> float:
        """Seconds to bring the KV of ``tokens`` from the host to the device."""
        return tokens * self.kv_bytes_per_token / self.load_bytes_per_s

    def decode(self, sequences: int, context: int) -> float:
        """Seconds of one decode step of ``sequences`` sequences with ``context`` tokens among them."""
        return self.decode_base + self.decode_per_sequence * sequences + self.decode_per_token * context

    def dumps(self) -> str:
        """The profile as TOML."""
        lines = []
        for name, value in dataclasses.asdict(self).items():
            text = '"""\n' + value.replace("\\", "\\\\") + '"""' if name == "source" else repr(value).replace("'", '"')
            lines.append(f"{name} = {text}")
        return "\n".join(lines) + "\n"


def names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in DIRECTORY.glob("*.toml"))


def load_profile(name: str) -> Profile:
    """A profile by its name or its file's path. Raises ``ConfigError``."""
    path = Path(name) if name.endswith(".toml") else DIRECTORY / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        known = ", ".join(names())
        raise ConfigError("--profile", name, f"cannot be read: {error}", hint=f"one of {known}, or a file") from error
    except ValueError as error:
        raise ConfigError("--profile", str(path), f"is no TOML: {error}") from error
    return of(content, str(path))


def of(content: dict[str, Any], source: str) -> Profile:
    """A profile from a table; unknown or missing fields and wrong types are ``ConfigError``."""
    fields = {field.name: field for field in dataclasses.fields(Profile)}
    for name, value in content.items():
        if name not in fields:
            raise ConfigError(name, value, "is not a field of a profile", hint=f"known: {', '.join(fields)}")
        text = fields[name].type == "str"
        if isinstance(value, str) != text or isinstance(value, bool):
            raise ConfigError(f"{source}: {name}", value, "should be text" if text else "should be a number")
    try:
        return Profile(**content)
    except TypeError as error:
        raise ConfigError("profile", source, str(error).partition("() ")[2]) from error


# -- fitting


class Prefill(NamedTuple):
    """A measurement: seconds to the first token of a prompt of ``new`` tokens behind ``prefix`` cached ones."""

    new: int
    prefix: int
    seconds: float


class Fit(NamedTuple):
    """Coefficients, and by how much of the measured value they are off: root mean square and worst."""

    coefficients: list[float]
    rms_error: float
    worst_error: float


def fit_prefill(samples: Sequence[Prefill], chunk_tokens: int) -> Fit:
    """``pass_base``, ``per_token`` and ``per_pair`` that fit best.

    >>> samples = [Prefill(n, p, 0.01 + 1e-4 * n + 1e-8 * n * (p + (n + 1) / 2)) for n in (64, 512) for p in (0, 999)]
    >>> [f"{value:.1e}" for value in fit_prefill(samples, 8192).coefficients]
    ['1.0e-02', '1.0e-04', '1.0e-08']
    """
    rows = [(-(-s.new // chunk_tokens), s.new, s.new * (s.prefix + (s.new + 1) / 2)) for s in samples]
    return least_squares(rows, [s.seconds for s in samples])


def least_squares(rows: Iterable[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Non-negative coefficients that minimise the squared *relative* error: short prompts count like long ones.

    What would come out negative, or cannot be told from the data, is left out, and the rest fitted again.
    """
    measured = np.asarray(seconds, dtype=np.float64)
    matrix = np.asarray(list(rows), dtype=np.float64)
    if not len(measured) or measured.min() <= 0:
        raise ValueError("a fit needs measurements, and each more than no time")
    scaled = matrix / measured[:, None]
    kept = [column for column in range(matrix.shape[1]) if matrix[:, column].any()]
    while True:
        size = np.linalg.norm(scaled[:, kept], axis=0)
        solution: npt.NDArray[np.float64] = np.linalg.lstsq(scaled[:, kept] / size, np.ones(len(measured)))[0] / size
        if not kept or solution.min() >= 0:
            break
        kept.pop(int(solution.argmin()))
    coefficients = np.zeros(matrix.shape[1])
    coefficients[kept] = solution
    error = matrix @ coefficients / measured - 1
    return Fit(coefficients.tolist(), float(np.sqrt(np.mean(error**2))), float(np.abs(error).max()))
