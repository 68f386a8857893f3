"""The CLI's operator commands: gather, then print a table or JSON."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from hicache_mooncake import config_values
from hicache_mooncake.config import Settings
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.metadata.directory import Directory
from hicache_mooncake.operate import doctor, orders, pool_view, prompts
from hicache_mooncake.operate.capacity import plan, shape_of
from hicache_mooncake.operate.facts import facts
from hicache_mooncake.operate.options import SETTINGS

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def run(given: argparse.Namespace) -> int:
    """Carry out a command of :mod:`options`; its exit status: 1 when something is wrong with the pool."""
    if given.command == "capacity":
        return capacity(given)
    overrides = {name: getattr(given, name) for name in SETTINGS if getattr(given, name) is not None}
    return _COMMANDS[given.command](given, Settings.load(overrides, file=given.config))


def capacity(given: argparse.Namespace) -> int:
    path = Path(given.model)
    try:
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    except (ValueError, OSError) as error:
        raise ConfigError("CONFIG", given.model, f"a model's config.json is expected: {error}") from error
    try:
        size = config_values.size(given.size)
    except ValueError as error:
        raise ConfigError("--size", given.size, str(error)) from None
    shape = shape_of(config)
    watermark = float(Settings().high_watermark)
    found = plan(
        shape, given.dtype, given.page_size, size, watermark=watermark, parts=1 if shape.kind == "MLA" else given.tp
    )
    if given.json:
        return _json({"kind": shape.kind, "layers": shape.layers, **asdict(found)})
    page = f"{_size(found.page_bytes)} a page of {given.page_size} tokens"
    print(f"{shape.kind}, {shape.layers} layers: {found.token_bytes} bytes a token in {given.dtype}, {page}")
    print(f"{_size(size)} hold {found.pages} pages, {found.tokens} tokens, up to the watermark of {watermark:g}")
    print(f"Redis needs {_size(found.redis_bytes)} for them")
    return 0


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
        found = pool_view.listing(pool, digest=given.namespace, page_hash="", limit=given.limit + 1)
    _print_objects(given, found[: given.limit])
    if len(found) > given.limit and not given.json:
        print(f"there are more than these {given.limit}: --limit shows more of them")
    return 0


def inspect_pages(given: argparse.Namespace, settings: Settings) -> int:
    if bool(given.hash) == bool(given.tokens):
        raise ConfigError("--tokens", given.tokens or "", "either a page hash or --tokens is expected")
    tokens = prompts.read_tokens(given.tokens) if given.tokens else []
    with pool_view.directory(settings) as pool:
        if given.tokens:
            return _inspect_prompt(given, settings, pool, tokens)
        found = pool_view.listing(pool, digest="", page_hash=given.hash, limit=1000)
    if not found and not given.json:
        plain = re.fullmatch(r"[0-9a-f]{64}", given.hash)
        print(f"nothing is stored under {given.hash!r}" + ("" if plain else ": a page hash has 64 hex digits"))
        return 0
    return _print_replicas(given, settings, found)


def _inspect_prompt(given: argparse.Namespace, settings: Settings, pool: Directory, tokens: list[int]) -> int:
    best = pool_view.Prompt(0, 0, 0, [])
    for page_size in [given.page_size] if given.page_size else pool_view.page_sizes(pool):
        hashes = prompts.hashes_of(given, tokens, page_size)
        prompt = pool_view.prompt(pool, hashes, page_size)
        if not best.page_size or prompt.tokens > best.tokens:
            best = prompt
    if not best.page_size:
        raise ConfigError("--page-size", "", "no namespace in Redis tells the size of a page", hint="give it")
    if not given.json:
        print(
            f"{best.held} of {best.pages} pages of {best.page_size} tokens are held: "
            f"{best.tokens} tokens from the first one on"
        )
    return _print_replicas(given, settings, best.objects)


def clear_namespaces(given: argparse.Namespace, settings: Settings) -> int:
    known = pool_view.known_namespaces(settings)
    for digest in given.namespace:
        if not re.fullmatch(r"[0-9a-f]{16}", digest) or (known is not None and digest not in known):
            listed = ", ".join(sorted(known or ())) or "none can be seen now"
            raise ConfigError("DIGEST", digest, f"it is no namespace of the pool; its namespaces: {listed}")
    with pool_view.local_node(settings) as node:
        cleared = node.clear(given.namespace, within=30.0)
    if given.json:
        _json({"objects": cleared.objects, "unreached": cleared.unreached})
    else:
        print(f"{cleared.objects} objects dropped")
        if cleared.unreached:
            print(f"not reached, may hold more: {', '.join(cleared.unreached)}")
    return 1 if cleared.unreached else 0


def pin(given: argparse.Namespace, settings: Settings) -> int:
    return _print_outcome(given, orders.pin(given, settings), "pinned")


def unpin(given: argparse.Namespace, settings: Settings) -> int:
    return _print_outcome(given, orders.unpin(given, settings), "let go")


def evict(given: argparse.Namespace, settings: Settings) -> int:
    return _print_outcome(given, orders.evict(given, settings), "dropped")


def verify(given: argparse.Namespace, settings: Settings) -> int:
    jobs, unreached = orders.verify(given, settings)
    rotten = [key for job in jobs.values() for key in job.dropped]
    if given.json:
        _json({"nodes": {name: msgspec.to_builtins(job) for name, job in jobs.items()}, "unreached": unreached})
    else:
        _table(
            ("node", "state", "checked", "objects", "rotten, dropped"),
            [[n, j.error or j.state, _size(j.done), str(j.objects), str(len(j.dropped))] for n, j in jobs.items()],
        )
        for key in rotten:
            print(f"dropped {key}")
        if unreached:
            print(f"not reached: {', '.join(unreached)}")
    return 1 if rotten or unreached or any(job.state != "done" for job in jobs.values()) else 0


def run_doctor(given: argparse.Namespace, settings: Settings) -> int:
    try:
        words = shlex.split(given.sglang)
    except ValueError as error:
        allowed = f"a command line is expected, as the shell takes it ({str(error).lower()})"
        raise ConfigError("--sglang", given.sglang, allowed) from error
    findings = doctor.examine(facts(settings, doctor.parse_sglang_flags(words)))
    if given.json:
        _json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{_MARKS[finding.level]} {finding.check}: {finding.found}")
            if finding.remedy:
                print(f"     -> {finding.remedy}")
    return 1 if any(finding.level == "fail" for finding in findings) else 0


_COMMANDS: dict[str, Callable[[argparse.Namespace, Settings], int]] = {
    "status": status,
    "nodes": nodes,
    "ls": ls,
    "inspect": inspect_pages,
    "pin": pin,
    "unpin": unpin,
    "evict": evict,
    "verify": verify,
    "clear": clear_namespaces,
    "doctor": run_doctor,
}


# -- printing


def _print_nodes(found: Sequence[dict[str, Any]]) -> None:
    disks = ("ssd used", "ssd size", "on ssd") if any(node["ssd_capacity"] for node in found) else ()
    _table(
        ("node", "host", "address", "used", "capacity", "objects", *disks, "version", "up"),
        [
            [
                node["id"],
                node["host"],
                node["addresses"].get("tcp", ""),
                _size(node["used"]),
                _size(node["capacity"]),
                str(node["pages"]),
                *([_size(node["ssd_used"]), _size(node["ssd_capacity"]), str(node["ssd_pages"])] if disks else []),
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


def _print_replicas(given: argparse.Namespace, settings: Settings, found: Sequence[pool_view.ObjectView]) -> int:
    """Objects, and how each owner has them."""
    replicas = orders.replicas(settings, list(dict.fromkeys(view.page_hash for view in found)))
    owned = [(view, replicas.get(f"{view.digest}:{view.page_hash}:{view.part}", [])) for view in found]
    if given.json:
        return _json(
            [
                {**asdict(view), "replicas": [{"node": n, **msgspec.structs.asdict(r)} for n, r in owners]}
                for view, owners in owned
            ]
        )
    _print_objects(given, found)
    rows = [
        [
            view.page_hash,
            view.part,
            node,
            _size(replica.size),
            replica.protection + (f" ({replica.pin_left:.0f} s left)" if replica.protection == "soft" else ""),
            "yes" if replica.extra else "no",
            str(replica.readers),
            f"{replica.idle:.0f} s ago",
        ]
        for view, owners in owned
        for node, replica in owners
    ]
    if rows:
        print()
        _table(("page hash", "part", "node", "size", "pinned", "extra", "readers", "last use"), rows)
    return 0


def _print_outcome(given: argparse.Namespace, outcome: orders.Outcome, what: str) -> int:
    if given.json:
        _json(asdict(outcome))
    else:
        if outcome.pages:
            print(f"{outcome.found} of {outcome.pages} pages are held")
        print(f"{outcome.objects} objects {what}, {_size(outcome.bytes)}")
        if outcome.left:
            print(f"{outcome.left} objects left as they are: hard-pinned, or more than may be")
        if outcome.unreached:
            print(f"not reached: {', '.join(outcome.unreached)}")
    return 1 if outcome.unreached else 0


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
