"""What an operator should be told when an engine attaches: settings that are exposed, and settings without effect."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hicache_mooncake.config import Settings
from hicache_mooncake.config_values import masked_url
from hicache_mooncake.engine.identity import published
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.protocol import messages as m

logger = logging.getLogger(__name__)

OF_THE_NODE = (
    "redis_url",
    "segment_size",
    "listen",
    "advertise",
    "name",
    "huge_pages",
    "high_watermark",
    "copy_threads",
    "heartbeat",
    "metrics_port",
    "shards",
    "node_linger",
)
"""Settings that only the node uses; an engine's own have no effect on one that runs already."""


def advise(settings: Settings, extra: Mapping[str, object] | None, found: m.Welcome | None) -> None:
    """Warn of what is given in vain or for all to see. ``found`` is the node, unless it was started for this engine."""
    if names := exposed(extra, published("hicache_storage_backend_extra_config")):
        logger.warning(
            "EXPOSED: SGLang prints and serves its configuration, and with it the secret in %s; give a file "
            "(secret_file, or @FILE as the extra config) or HICACHE_MOONCAKE_... environment variables instead",
            " and ".join(names),
        )
    if found is not None and (differences := without_effect(settings, found)):
        logger.warning(
            "node %s ran already with other settings, so these have no effect: %s",
            found.node_id,
            "; ".join(differences),
        )


def exposed(extra: Mapping[str, object] | None, shown: str) -> list[str]:
    """Settings of SGLang's extra config that hold a secret which SGLang prints and serves.

    ``shown`` is that configuration as SGLang publishes it: ``@file`` gives the same ``extra`` and shows only its name.

    >>> exposed({"secret": "s3", "redis_url": "redis://cache:6379"}, '{"secret": "s3"}')
    ['secret']
    >>> exposed({"redis_url": "redis://:pw@cache:6379"}, "@/etc/cache.yaml")
    []
    """
    if shown.startswith("@"):
        return []
    given = extra or {}
    url = given.get("redis_url")
    return [
        *(["secret"] if given.get("secret") else []),
        *(["redis_url"] if isinstance(url, str) and masked_url(url) != url else []),
    ]


def without_effect(settings: Settings, welcome: m.Welcome) -> list[str]:
    """Settings given here that a node which ran already does not follow, each with what holds instead."""
    ours, theirs = settings.public(), welcome.settings
    given = settings.explicit()
    found = [
        f"{name} is {theirs[name] or 'not set'} there, {ours[name]} here"
        for name in OF_THE_NODE
        if name in given and name in theirs and theirs[name] != str(ours[name])
    ]
    if (settings.secret or settings.secret_file) and not _same_secret(settings, welcome):
        name = "secret_file" if settings.secret_file else "secret"
        found.append(f"{name} is {'another' if welcome.proof else 'not set'} there")
    return found


def _same_secret(settings: Settings, welcome: m.Welcome) -> bool:
    try:
        secret = settings.shared_secret()
    except ConfigError:
        return False  # a file that only the node needs to read
    return m.secret_proof(secret, welcome.session) == welcome.proof
