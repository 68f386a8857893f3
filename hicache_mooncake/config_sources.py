"""Where settings come from: a mapping, a file, the environment; brought under our own names, not parsed.

Here lives what is known about foreign keys: those that SGLang reads from the same dictionary, and those of
SGLang's own Mooncake backend, which are mapped, or refused with the name of the setting that does the job.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from hicache_mooncake.errors import ConfigError

ENV_PREFIX = "HICACHE_MOONCAKE_"
ENV_CONFIG = ENV_PREFIX + "CONFIG"
HIDDEN = "…"
"""Stands for a value in an error: behind a misspelt name it may be the secret."""


SGLANG_KEYS = frozenset(
    (
        "allocator",
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    )
)
"""Keys that SGLang reads from the same dictionary: none of our business, dropped."""

UPSTREAM_NAMES = {
    "global_segment_size": "segment_size",
    "ssd_offload_path": "ssd_path",
    "tenant_id": "tenant",
}
"""Keys of SGLang's own Mooncake backend that mean the same here under another name."""


class Replaced(NamedTuple):
    """Why a key of SGLang's own Mooncake backend has no meaning here, and which setting does that job."""

    ours: str
    why: str
    inert: tuple[object, ...] = ()  # values that ask for nothing, and are accepted


UPSTREAM_REFUSED = {
    "master_server_address": Replaced("redis_url", "there is no master; the directory of the pool is in Redis"),
    "metadata_server": Replaced("redis_url", "there is no metadata server; the directory of the pool is in Redis"),
    "client_server_address": Replaced("node", "the local node is reached over a unix socket"),
    "local_hostname": Replaced(
        "advertise", "the data port is on loopback until `listen` and `advertise` say otherwise"
    ),
    "master_metrics_port": Replaced("redis_url", "there is no master whose metrics could be asked"),
    "check_server": Replaced("node", "the local node is found or started, and waited for, by itself", (False,)),
    "standalone_storage": Replaced("node", "start a node of its own and name its unix socket", (False,)),
    "enable_group_semantics": Replaced("high_watermark", "the parts of a page are one object here", (False,)),
}

# A Kubernetes service named like us puts these into every pod of its namespace.
_SERVICE_LINK = re.compile(r"(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.*)?|PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_.*)?)?)")


def unknown(key: object, known: Collection[str]) -> ConfigError:
    near = difflib.get_close_matches(str(key), [*known, *UPSTREAM_NAMES], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "docs/configuration.md lists the settings"
    return ConfigError(str(key), HIDDEN, "there is no such setting", hint=hint)


def canonical(source: Mapping[str, object], known: Collection[str]) -> dict[str, object]:
    """``source`` under our own names, without what belongs to SGLang or was not given."""
    found: dict[str, object] = {}
    for key, raw in source.items():
        if raw is None or key in SGLANG_KEYS:
            continue
        replaced = UPSTREAM_REFUSED.get(key)
        if replaced is not None:
            if raw in replaced.inert:
                continue
            raise ConfigError(key, HIDDEN, replaced.why, hint=f"use {replaced.ours!r}")
        name = UPSTREAM_NAMES.get(key, key)
        if name not in known:
            raise unknown(key, known)
        if name in found:
            alias = next(other for other in source if other != name and UPSTREAM_NAMES.get(other) == name)
            raise ConfigError(alias, HIDDEN, f"it is another name of {name!r}, which is given too", hint="give one")
        found[name] = raw
    return found


def read_file(path: str) -> Mapping[str, object]:
    """The settings in a file, by its suffix. Raises :class:`ConfigError`."""
    suffix = os.path.splitext(path)[1].lower()
    try:
        with open(path, "rb") as file:
            content = file.read()
        if suffix == ".json":
            data = json.loads(content)
        elif suffix == ".toml":
            toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
            data = toml.loads(content.decode())
        elif suffix in (".yaml", ".yml"):
            data = _yaml(content)
        else:
            raise ConfigError("config", path, "a .json, .toml, .yaml or .yml file is expected")
    except OSError as error:
        raise ConfigError("config", path, f"the file cannot be read: {error.strerror}") from error
    except ValueError as error:
        # Only where, not what: a parser's message quotes the file, which may hold the secret.
        line = getattr(error, "lineno", 0)
        place = f" (line {line})" if line else ""
        raise ConfigError("config", path, f"the file is not valid {suffix[1:].upper()}{place}") from None
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError("config", path, "the file must hold one table of settings")
    return {str(key): raw for key, raw in data.items()}


class _NotYaml(ValueError):
    def __init__(self, line: int) -> None:
        super().__init__("not YAML")
        self.lineno = line


def _yaml(content: bytes) -> object:
    import yaml  # noqa: PLC0415 - most have no such file, and every start would pay for it

    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise _NotYaml(mark.line + 1 if mark else 0) from None


def from_environment(env: Mapping[str, str], known: Collection[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_CONFIG or not raw:
            continue
        suffix = variable[len(ENV_PREFIX) :]
        if suffix.lower() in known and suffix.isupper():
            found[suffix.lower()] = raw
        elif not _SERVICE_LINK.fullmatch(suffix):
            near = difflib.get_close_matches(suffix.lower(), known, n=1)
            hint = f"did you mean {ENV_PREFIX + near[0].upper()!r}?" if near else ""
            raise ConfigError(variable, HIDDEN, "there is no such setting", hint=hint)
    return found
