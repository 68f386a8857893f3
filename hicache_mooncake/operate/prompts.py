"""Which pages a prompt has: the bridge from token ids to page hashes, for commands that take ``--tokens``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hicache_mooncake.config import Settings
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.operate import pool_view
from hicache_mooncake.radix_bridge import namespace_seed, page_hashes


def read_tokens(place: str) -> list[int]:
    """Token ids from a file, or from standard input for ``-``. Raises ``ConfigError``."""
    try:
        content = json.loads(sys.stdin.read() if place == "-" else Path(place).read_text())
    except OSError as error:
        raise ConfigError("--tokens", place, f"it cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError("--tokens", place, f"a JSON list of token ids is expected ({error})") from error
    if not isinstance(content, list):
        raise ConfigError("--tokens", place, "a JSON list of token ids is expected")
    return content


def hashes_of(given: argparse.Namespace, tokens: list[int], page_size: int) -> list[str]:
    """The hashes of a prompt's pages as its requests name them."""
    try:
        return page_hashes(tokens, page_size, prior=namespace_seed(given.extra_key, given.cache_salt))
    except (ValueError, TypeError) as error:
        raise ConfigError("--tokens", given.tokens, f"a JSON list of token ids is expected ({error})") from error


def pages_of_tokens(given: argparse.Namespace, settings: Settings) -> tuple[list[str], int]:
    """The prompt's page hashes for every page size there is, and how many pages it has at the smallest of them."""
    tokens = read_tokens(given.tokens)
    if given.page_size:
        sizes = [given.page_size]
    else:
        with pool_view.directory(settings) as pool:
            sizes = pool_view.page_sizes(pool)
    if not sizes:
        raise ConfigError("--page-size", "", "no namespace in Redis tells the size of a page", hint="give it")
    by_size = [hashes_of(given, tokens, size) for size in sizes]
    return [page_hash for hashes in by_size for page_hash in hashes], max(map(len, by_size))
