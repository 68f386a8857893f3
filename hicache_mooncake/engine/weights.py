"""Notices when SGLang replaces the model's weights in this process: from then on its pages are others.

What is stored under a name must be what the weights of that name compute. An update of the weights changes them under
the same name, so a backend that was attached before stops: every page is a miss, and nothing is stored, until it is
attached again under a name that was not in use before the update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hicache_mooncake.errors import ConfigError

UPDATES = tuple(
    f"sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_{source}"
    for source in ("disk", "distributed", "tensor", "ipc")
)
"""SGLang's methods that replace weights while it serves, in the process that the backend lives in."""

_lock = threading.Lock()
_updates = 0
_names: dict[tuple[str, ...], int] = {}


def updating(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around each of :data:`UPDATES`. Counted before anything changes: what is under way meanwhile is old already."""
    global _updates  # noqa: PLW0603 - weights belong to the process, as SGLang's own configuration does
    with _lock:
        _updates += 1
    return original(*args, **kwargs)


def updates() -> int:
    """How often weights were replaced in this process."""
    return _updates


def claim(*name: str) -> int:
    """Use a name for the weights as they are now; the count of updates for which it holds.

    Raises ``ConfigError`` when the name stood for weights that have been replaced since.
    """
    with _lock:
        used = _names.setdefault(name, _updates)
        if used != _updates:
            raise ConfigError(
                "revision",
                name[0],
                "the weights were replaced while this name was in use",
                hint="name the new weights: another 'revision', or 'weight_version' in the update request",
            )
        return used
