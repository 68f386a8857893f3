"""Settings: one typed schema, read from SGLang's extra config, a file and the environment.

The first source that gives a setting wins: SGLang's ``--hicache-storage-backend-extra-config``, then the file
(``--config``, or the path in ``HICACHE_MOONCAKE_CONFIG``; JSON, TOML or YAML), then
``HICACHE_MOONCAKE_<NAME>``. Null and, in the environment, empty values count as not given.
``python -m hicache_mooncake.config`` prints the reference in ``docs/configuration.md``.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from hicache_mooncake import config_values as values
from hicache_mooncake.config_sources import (
    ENV_CONFIG,
    ENV_PREFIX,
    SGLANG_KEYS,
    UPSTREAM_NAMES,
    UPSTREAM_REFUSED,
    canonical,
    from_environment,
    read_file,
    unknown,
)
from hicache_mooncake.config_values import Parser
from hicache_mooncake.errors import ConfigError

MASK = "***"

SMALLEST_SEGMENT = 4096
"""Bytes of one granule of the segment: with less a node could store nothing, though it says that it stores."""


def _setting(default: object, parse: Parser, allowed: str, doc: str, *, secret: bool = False, by: str = "node") -> Any:
    """``by``: which process acts on it, the ``node``, the ``engine`` (SGLang), or ``both``."""
    metadata = {"parse": parse, "allowed": allowed, "doc": doc, "secret": secret, "by": by}
    return field(default=default, metadata=metadata)


def _size(low: int, high: int, allowed: str) -> Parser:
    return values.within(values.size, low, high, allowed)


def _seconds(low: float, high: float) -> Parser:
    return values.within(values.duration, low, high, f"{low:g} s to {high:g} s is expected")


def _segment_size(raw: object) -> int:
    size: int = values.within(values.size, 0, 1 << 50, "0 to 1024 TiB is expected")(raw)
    if 0 < size < SMALLEST_SEGMENT:
        raise ValueError(f"0, or at least {SMALLEST_SEGMENT} bytes, is expected")
    return size


_TEXT = "text"
_NAME_ALLOWED = "1 to 64 of `A-Z a-z 0-9 _ . -`"
_SECONDS_ALLOWED = "seconds, `500ms`, `5s`"
_SIZE_ALLOWED = "bytes, `512MiB`, `4gb`"
_SSD_DETAILS = ("ssd_path", "ssd_size", "ssd_store")
_SHARE = values.within(values.number, 0.05, 1.0, "0.05 to 1 is expected")


@dataclass(frozen=True, repr=False)
class Settings:
    """Every setting of the package, typed and checked. Build it with :meth:`load`.

    ``repr`` and ``str`` show no secret: neither ``secret`` nor a password in ``redis_url``.
    """

    pool: str = _setting(
        "default",
        values.name,
        _NAME_ALLOWED,
        "Name of the pool. Pools that share a Redis do not see each other.",
        by="both",
    )
    redis_url: str = _setting(
        "",
        values.redis_url,
        "`redis://`, `redis+sentinel://`, `redis+cluster://`, `unix://` URL",
        "Redis or Valkey that holds the directory of the pool, see [redis.md](redis.md). "
        "Empty: the node starts a private one, for this host only.",
        secret=True,
    )
    node: str = _setting(
        "",
        values.socket_path,
        "absolute path, `@name`",
        "Unix socket of the local node; `@name` is an abstract one. Empty: the user's and pool's own place, where an "
        "engine that finds no node starts one.",
        by="both",
    )
    name: str = _setting(
        "", values.optional_name, _NAME_ALLOWED, "Name of the node, for people. Empty: the host's name."
    )
    segment_size: int = _setting(
        4 << 30,
        _segment_size,
        _SIZE_ALLOWED,
        "DRAM that this host's node gives to the pool. 0: none, the node is only a client.",
    )
    protocol: str = _setting(
        "auto",
        values.choice("auto", "tcp", "rdma"),
        "`auto`, `tcp`, `rdma`",
        "How pages move between hosts. `auto`: by RDMA with nodes that have it too where this host has a device, else "
        "over TCP. `rdma`: never falls back to TCP; without a device the node does not start.",
    )
    device_name: str = _setting(
        "",
        values.text,
        _TEXT,
        "RDMA devices: names by commas (`mlx5_0,mlx5_1`), `numa:0` for those of a NUMA node, or a JSON object of such "
        "lists, all of which are used. Empty: all fast ones whose link is up.",
    )
    listen: str = _setting(
        "127.0.0.1:0",
        values.endpoint,
        "`host:port`, `[v6]:port`",
        "Address of the node's data port; port 0 lets the system choose. On loopback other hosts cannot read from it.",
    )
    advertise: str = _setting(
        "",
        values.contact,
        "`host`, `host:port`",
        "Address under which other hosts reach the data port. Empty: what is listened on.",
    )
    secret: str = _setting(
        "",
        values.text,
        _TEXT,
        "Shared secret with which nodes prove themselves to each other. Prefer `secret_file`.",
        secret=True,
    )
    secret_file: str = _setting(
        "",
        values.file_path,
        "absolute path",
        "File that holds the shared secret; a final line break is ignored.",
    )
    tenant: str = _setting("default", values.name, _NAME_ALLOWED, "Tenants do not see each other's pages.", by="engine")
    extra_backend_tag: str = _setting(
        "", values.text, _TEXT, "Free text that becomes part of the identity of every page.", by="engine"
    )
    revision: str = _setting(
        "",
        values.text,
        _TEXT,
        "Revision of the model's weights, part of the identity of every page. Empty: the checkpoint's files are looked "
        "at; set it where hosts hold the same weights in other files.",
        by="engine",
    )
    op_timeout: float = _setting(
        3.0, _seconds(0.01, 3600), _SECONDS_ALLOWED, "Longest that one batch of reads or writes may take.", by="both"
    )
    verify: str = _setting(
        "always", values.choice("always"), "`always`", "When a page's checksum is verified: on every read."
    )
    huge_pages: str = _setting(
        "auto",
        values.choice("auto", "on", "off"),
        "`auto`, `on`, `off`",
        "2 MiB pages for the segment: where the host has them, required, or never.",
    )
    staging_size: int = _setting(
        64 << 20,
        _size(1 << 20, 1 << 40, "1 MiB to 1 TiB is expected"),
        _SIZE_ALLOWED,
        "Shared memory through which pages go whose L2 pool cannot be shared.",
        by="engine",
    )
    high_watermark: float = _setting(
        0.90,
        values.within(values.number, 0.05, 1.0, "0.05 to 1 is expected"),
        "0.05 to 1",
        "Used part of the segment above which pages are evicted.",
    )
    pin_ttl: float = _setting(
        1800.0,
        _seconds(1, 86400),
        _SECONDS_ALLOWED,
        "How long a soft pin lasts after the last use of the page, where `hicache-mooncake pin` names no `--ttl`.",
    )
    copy_threads: int = _setting(
        0,
        values.within(values.integer, 0, 256, "0 to 256 is expected"),
        "0 to 256",
        "Threads of the node that copy pages. 0: chosen by the number of CPUs.",
    )
    heartbeat: float = _setting(
        1.0,
        _seconds(0.05, 300),
        _SECONDS_ALLOWED,
        "How often a node says in Redis that it lives. It counts as dead after three missed ones.",
    )
    metrics_port: int = _setting(
        0,
        values.within(values.integer, 0, 65535, "0 to 65535 is expected"),
        "0 to 65535",
        "Port of the node's metrics page for Prometheus, on the host of `listen`. 0: none.",
    )
    shards: int = _setting(
        0,
        values.within(values.integer, 0, 64, "0 to 64 is expected"),
        "0 to 64",
        "Parts of the directory, each in one slot of a Redis Cluster, fixed when the pool is created. 0: as the pool "
        "has it; for a new one 1 for a single Redis, one a master for a Cluster.",
    )
    node_linger: float = _setting(
        0.0,
        _seconds(0, 86400 * 365),
        _SECONDS_ALLOWED,
        "How long a node that was started for you outlives its last user.",
    )
    enable_ssd_offload: bool = _setting(
        False, values.flag, "`true`, `false`", "The SSD tier below the segment. On when `ssd_path` is given."
    )
    ssd_path: str = _setting(
        "",
        values.file_path,
        "absolute path",
        "Directory of the SSD tier; for the store `offset` also a file or device.",
    )
    ssd_size: int = _setting(
        0,
        _size(0, 1 << 60, "a size is expected"),
        _SIZE_ALLOWED,
        "Real bytes on disk that the SSD tier takes at most. 0: nine tenths of what is free there at start.",
    )
    ssd_store: str = _setting(
        "bucket",
        values.name,
        _NAME_ALLOWED,
        "How objects lie on disk: `bucket`, `offset`, `file_per_key`, `shared`, or an installed package's store.",
    )
    ssd_io: str = _setting(
        "auto",
        values.choice("auto", "io_uring", "threads"),
        "`auto`, `io_uring`, `threads`",
        "How the disk is spoken to.",
    )
    ssd_queue_depth: int = _setting(
        64,
        values.within(values.integer, 1, 4096, "1 to 4096 is expected"),
        "1 to 4096",
        "Requests that a thread has at the disk at a time.",
    )
    ssd_high_watermark: float = _setting(
        0.95, _SHARE, "0.05 to 1", "Used part of `ssd_size` above which objects are removed from disk."
    )
    ssd_low_watermark: float = _setting(0.90, _SHARE, "0.05 to 1", "Used part of `ssd_size` down to which they are.")
    ssd_eviction: str = _setting(
        "fifo", values.choice("fifo", "lru"), "`fifo`, `lru`", "Which buckets go first. Other stores always use `lru`."
    )
    ssd_fsync: bool = _setting(
        False, values.flag, "`true`, `false`", "Whether objects survive a loss of power, not only of the process."
    )
    ssd_staging: int = _setting(
        64 << 20,
        _size(1 << 20, 1 << 40, "1 MiB to 1 TiB is expected"),
        _SIZE_ALLOWED,
        "DRAM beside the segment through which pages of the SSD pass.",
    )
    offload: str = _setting(
        "eager",
        values.choice("eager", "on_evict", "off"),
        "`eager`, `on_evict`, `off`",
        "When pages go to SSD: every new one in the background, those about to be evicted from DRAM, or none.",
    )
    offload_queue: int = _setting(
        8192,
        values.within(values.integer, 1, 1 << 20, "1 to 1048576 is expected"),
        "1 to 1048576",
        "Pages that wait to be written to SSD at most. More are not offloaded.",
    )
    offload_watermark: float = _setting(
        0.70,
        _SHARE,
        "0.05 to 1",
        "With `on_evict`: used part of the segment above which the coldest pages are written.",
    )
    force_evict: bool = _setting(
        False, values.flag, "`true`, `false`", "With `on_evict`: evict also what the queue had no room for."
    )
    promotion_threshold: int = _setting(
        2,
        values.within(values.integer, 0, 255, "0 to 255 is expected"),
        "0 to 255",
        "Times that a page on SSD is asked for lately before it comes back to DRAM, if there is room. 0: never.",
    )

    @classmethod
    def load(
        cls,
        extra: Mapping[str, object] | None = None,
        *,
        file: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Settings:
        """Read and check all sources. ``env`` is ``os.environ`` when not given.

        Raises :class:`ConfigError` naming the setting, what was given and what is allowed.
        """
        environment = os.environ if env is None else env
        path = file or environment.get(ENV_CONFIG) or None
        given: dict[str, object] = {}
        for source in (
            canonical(extra or {}, _SPECS),
            canonical(read_file(path) if path else {}, _SPECS),
            from_environment(environment, _SPECS),
        ):
            for key, raw in source.items():
                given.setdefault(key, raw)
        return cls.of(given)

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Settings:
        """Settings from values under our own names, parsed and checked. Raises :class:`ConfigError`."""
        parsed: dict[str, Any] = {}
        for key, raw in given.items():
            spec = _SPECS.get(key)
            if spec is None:
                raise unknown(key, _SPECS)
            try:
                parsed[key] = spec["parse"](raw)
            except ValueError as error:
                raise ConfigError(key, _shown(key, raw), str(error)) from None
        if parsed.get("ssd_path"):
            parsed.setdefault("enable_ssd_offload", True)
        if parsed.get("enable_ssd_offload") is False:
            for key in _SSD_DETAILS:  # said to be off: what it would have used is inert
                parsed.pop(key, None)
        settings = cls(**parsed)
        settings._check_together()
        return settings

    def _check_together(self) -> None:
        if self.secret and self.secret_file:
            raise ConfigError("secret_file", self.secret_file, "one of secret and secret_file is expected, not both")
        if self.enable_ssd_offload and not self.ssd_path:
            raise ConfigError("ssd_path", "", "a directory is expected where enable_ssd_offload is true")
        if not self.ssd_path:
            for name in ("ssd_size", "ssd_store"):
                if getattr(self, name) != _SPECS[name]["default"]:
                    raise ConfigError(name, getattr(self, name), "it needs ssd_path, the directory of the SSD tier")
        if self.ssd_low_watermark > self.ssd_high_watermark:
            allowed = f"at most ssd_high_watermark ({self.ssd_high_watermark:g}) is expected"
            raise ConfigError("ssd_low_watermark", self.ssd_low_watermark, allowed)

    @property
    def node_name(self) -> str:
        """``name``, or the host's name with what a Redis key must not hold replaced by ``-``."""
        return self.name or re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()).lstrip(".-")[:64] or "node"

    def shared_secret(self) -> bytes:
        """What nodes prove to each other, from ``secret`` or ``secret_file``; empty when there is none.

        Raises :class:`ConfigError` when the file cannot be read or is empty.
        """
        if not self.secret_file:
            return self.secret.encode()
        try:
            with open(self.secret_file, "rb") as secret_file:
                content = secret_file.read(1 << 16).rstrip(b"\r\n")
        except OSError as error:
            raise ConfigError("secret_file", self.secret_file, f"it cannot be read: {error.strerror}") from error
        if not content:
            raise ConfigError("secret_file", self.secret_file, "the file is empty")
        return content

    def explicit(self) -> dict[str, object]:
        """What differs from the defaults, for :meth:`of` in a child process. **Holds secrets**."""
        return {key: getattr(self, key) for key, spec in _SPECS.items() if getattr(self, key) != spec["default"]}

    def public(self) -> dict[str, object]:
        """Every setting with secrets masked: for people, logs and metrics."""
        return {key: _shown(key, getattr(self, key)) for key in _SPECS}

    def __repr__(self) -> str:
        return "Settings(" + ", ".join(f"{key}={_shown(key, raw)!r}" for key, raw in self.explicit().items()) + ")"


_SPECS: dict[str, dict[str, Any]] = {f.name: {**f.metadata, "default": f.default} for f in fields(Settings)}
assert all(spec["default"] is not MISSING for spec in _SPECS.values())


def _shown(key: str, raw: object) -> object:
    """``raw`` as it may appear in a log: a setting that can hold a secret shows at most where, never what."""
    if not _SPECS[key]["secret"]:
        return raw
    if key == "redis_url" and isinstance(raw, str):
        return values.masked_url(raw)
    return MASK if raw else ""


def default_text(default: object, allowed: str) -> str:
    """A setting's default for people, in Markdown."""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, int) and allowed == _SIZE_ALLOWED and default:
        unit, label = (1 << 30, "GiB") if default % (1 << 30) == 0 else (1 << 20, "MiB")
        return f"`{default // unit}{label}`"
    return f"`{default}`" if default != "" else "empty"


def reference() -> str:
    """The text of ``docs/configuration.md``."""
    lines = [
        "# Configuration",
        "",
        "<!-- Generated by `python -m hicache_mooncake.config > docs/configuration.md`; do not edit. -->",
        "",
        "A setting is taken from the first of these that gives it:",
        "",
        "1. SGLang's `--hicache-storage-backend-extra-config` (a JSON string, or `@file.json|toml|yaml`),",
        f"2. the file named by `--config` or `{ENV_CONFIG}` (JSON, TOML or YAML by its suffix),",
        f"3. the environment: `{ENV_PREFIX}<NAME>`, such as `{ENV_PREFIX}REDIS_URL`.",
        "",
        "Null, and an empty environment variable, count as not given. Units of sizes are powers of 1024. "
        "An unknown name is refused.",
        "",
        "*Read by* says which process acts on a setting. An engine passes all of them on to a node that it starts; one "
        "that runs already has its own.",
        "",
        "| setting | default | allowed | read by | what it is for |",
        "|---|---|---|---|---|",
    ]
    for key, spec in _SPECS.items():
        default = default_text(spec["default"], spec["allowed"])
        lines.append(f"| `{key}` | {default} | {spec['allowed']} | {spec['by']} | {spec['doc']} |")
    lines += [
        "",
        "## Coming from SGLang's `mooncake` backend",
        "",
        "Its environment variables (`MOONCAKE_*`) are not read. Of its extra config:",
        "",
        "| key | here |",
        "|---|---|",
    ]
    lines += [f"| `{key}` | the same as `{ours}` |" for key, ours in UPSTREAM_NAMES.items()]
    for key, replaced in UPSTREAM_REFUSED.items():
        inert = "".join(f" (`{str(word).lower()}` is accepted)" for word in replaced.inert)
        lines.append(f"| `{key}` | refused{inert}: {replaced.why}; see `{replaced.ours}` |")
    ignored = ", ".join(f"`{key}`" for key in sorted(SGLANG_KEYS))
    lines += ["", f"Keys that SGLang reads from the same dictionary are ignored: {ignored}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(reference())
