"""The CLI's operator commands: gather, then print a table or JSON."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache_mooncake.config import Settings
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.operate import doctor, pool_view
from hicache_mooncake.radix_bridge import namespace_seed, page_hashes

Command = Callable[[argparse.Namespace, Settings], int]

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def add_commands(commands: Any) -> None:
    """Add the subcommands to an argparse subparsers object; each sets ``run`` to its function."""
    _command(commands, "status", "the pool on one page: nodes, memory, namespaces, this host's counters", status)
    _command(commands, "nodes", "the nodes that are alive", nodes)
    listing = _command(commands, "ls", "objects that are stored", ls)
    listing.add_argument("--namespace", default="", metavar="DIGEST", help="only of this namespace")
    listing.add_argument("--limit", type=int, default=50, help="at most so many (default 50)")
    inspect = _command(commands, "inspect", "where the pages of a prompt, or one page, are held", inspect_pages)
    inspect.add_argument("hash", nargs="?", default="", help="a page hash")
    inspect.add_argument("--tokens", metavar="FILE", help="token ids of a prompt as a JSON list, - for standard input")
    inspect.add_argument("--page-size", type=int, default=64, help="tokens a page (default 64)")
    inspect.add_argument("--extra-key", default=None, help="the request's extra key, such as a LoRA id")
    inspect.add_argument("--cache-salt", default=None, help="the request's cache salt")
    clear = _command(commands, "clear", "drop a namespace's pages on every node", clear_namespaces)
    clear.add_argument("namespace", nargs="+", metavar="DIGEST", help="as in status")
    examine = _command(commands, "doctor", "what keeps the pool from working well, each with its remedy", run_doctor)
    examine.add_argument("--sglang", default="", metavar="ARGS", help="SGLang's command line, to be looked at too")


def _command(commands: Any, name: str, text: str, run: Command) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--config", metavar="FILE", help="settings as JSON, TOML or YAML")
    for setting in ("redis_url", "pool", "node"):
        parser.add_argument(f"--{setting.replace('_', '-')}", metavar="VALUE", help="as in the node's settings")
    return parser


def run(given: argparse.Namespace) -> int:
    """Carry out a command that :func:`add_commands` added; its exit status."""
    overrides = {
        name: getattr(given, name) for name in ("redis_url", "pool", "node") if getattr(given, name) is not None
    }
    command: Command = given.run
    return command(given, Settings.load(overrides, file=given.config))


def status(given: argparse.Namespace, settings: Settings) -> int:
    with pool_view.directory(settings) as pool:
        found = pool_view.status(settings, pool)
    if given.json:
        return _json(asdict(found))
    print(f"pool {found.pool}   redis {found.redis} ({found.redis_ms:g} ms)")
    share = f" ({100 * found.used / found.capacity:.0f} %)" if found.capacity else ""
    used = f"{_size(found.used)} of {_size(found.capacity)} used{share}"
    print(f"{len(found.nodes)} nodes   {used}   {found.objects} objects")
    _print_nodes(found.nodes)
    if found.namespaces:
        shown = ("digest", "model", "pool", "dtype", "layout", "page_size", "tp", "tenant", "tag")
        print()
        _table(shown, [[namespace.get(name, "") for name in shown] for namespace in found.namespaces])
    if found.local:
        print("\nthis host's node:")
        asked = found.local.get("get_asked", 0)
        hits = found.local.get("get_local", 0) + found.local.get("get_remote", 0)
        print(f"  objects asked {asked:.0f}, hits {hits:.0f}" + (f" ({100 * hits / asked:.1f} %)" if asked else ""))
        for name in sorted(found.local):
            print(f"  {name:28} {found.local[name]:.0f}")
    return 0


def nodes(given: argparse.Namespace, settings: Settings) -> int:
    with pool_view.directory(settings) as pool:
        found = [pool_view.describe_node(node) for node in pool.nodes().values()]
    if given.json:
        return _json(found)
    _print_nodes(found)
    return 0


def ls(given: argparse.Namespace, settings: Settings) -> int:
    with pool_view.directory(settings) as pool:
        found = pool_view.listing(pool, digest=given.namespace, page_hash="", limit=given.limit)
    return _print_objects(given, found)


def inspect_pages(given: argparse.Namespace, settings: Settings) -> int:
    if bool(given.hash) == bool(given.tokens):
        raise ConfigError("--tokens", given.tokens or "", "either a page hash or --tokens is expected")
    hashes = [given.hash]
    if given.tokens:
        text = sys.stdin.read() if given.tokens == "-" else Path(given.tokens).read_text()
        try:
            tokens = json.loads(text)
            prior = namespace_seed(given.extra_key, given.cache_salt)
            hashes = page_hashes(tokens, given.page_size, prior=prior)
        except (ValueError, TypeError) as error:
            raise ConfigError("--tokens", given.tokens, f"a JSON list of token ids is expected ({error})") from error
    found: list[pool_view.ObjectView] = []
    with pool_view.directory(settings) as pool:
        for page_hash in hashes:
            objects = pool_view.listing(pool, digest="", page_hash=page_hash, limit=1000)
            found += objects
            if given.tokens and not objects:
                break
    if given.tokens and not given.json:
        held = len({view.page_hash for view in found if view.holders})
        print(f"{held} of {len(hashes)} pages are held: {held * given.page_size} tokens from the first one on")
    return _print_objects(given, found)


def clear_namespaces(given: argparse.Namespace, settings: Settings) -> int:
    with pool_view.local_node(settings) as node:
        cleared = node.clear(given.namespace, within=30.0)
    if given.json:
        _json({"objects": cleared.objects, "unreached": cleared.unreached})
    else:
        print(
            f"{cleared.objects} objects dropped"
            + (f"; not reached: {', '.join(cleared.unreached)}" if cleared.unreached else "")
        )
    return 1 if cleared.unreached else 0


def run_doctor(given: argparse.Namespace, settings: Settings) -> int:
    findings = doctor.examine(doctor.facts(settings, doctor.parse_sglang_flags(shlex.split(given.sglang))))
    if given.json:
        _json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{_MARKS[finding.level]} {finding.check}: {finding.found}")
            if finding.remedy:
                print(f"     -> {finding.remedy}")
    return 1 if any(finding.level == "fail" for finding in findings) else 0


# -- printing


def _print_nodes(found: Sequence[dict[str, Any]]) -> None:
    _table(
        ("node", "host", "address", "used", "capacity", "objects", "version", "up"),
        [
            [
                node["id"],
                node["host"],
                node["addresses"].get("tcp", ""),
                _size(node["used"]),
                _size(node["capacity"]),
                str(node["pages"]),
                node["version"],
                f"{node['age']:.0f} s",
            ]
            for node in found
        ],
    )


def _print_objects(given: argparse.Namespace, found: Sequence[pool_view.ObjectView]) -> int:
    if given.json:
        return _json([asdict(view) for view in found])
    _table(
        ("namespace", "page hash", "part", "size", "held by"),
        [
            [
                view.digest,
                view.page_hash,
                view.part,
                str(view.size),
                " ".join([*view.holders, *(f"({word})" for word in view.dead)]),
            ]
            for view in found
        ],
    )
    if any(view.dead for view in found):
        print("in parentheses: a dead node's entry, which counts for nothing and is swept")
    return 0


def _json(content: Any) -> int:
    json.dump(content, sys.stdout, indent=2)
    print()
    return 0


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
