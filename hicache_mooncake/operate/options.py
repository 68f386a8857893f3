"""The options of the operator's commands. What they do is in ``commands``, imported when one is carried out."""

from __future__ import annotations

import argparse
from typing import Any

SETTINGS = ("redis_url", "pool", "node", "secret_file")
"""Settings that every command takes as options."""


def add_commands(commands: Any) -> None:
    """Add the subcommands to an argparse subparsers object."""
    _command(commands, "status", "the pool on one page: nodes, memory, namespaces, this host's counters")
    _command(commands, "nodes", "the nodes that are alive")
    listing = _command(commands, "ls", "objects that are stored")
    listing.add_argument("--namespace", default="", metavar="DIGEST", help="only of this namespace")
    listing.add_argument("--limit", type=_at_least_one, default=50, metavar="N", help="at most so many (default 50)")
    inspect = _command(commands, "inspect", "where the pages of a prompt, or one page, are held")
    inspect.add_argument("hash", nargs="?", default="", help="a page hash")
    _prompt(inspect)
    pin = _command(commands, "pin", "keep the pages of a prompt when memory is needed for others")
    _of_pages(pin)
    pin.add_argument("--hard", action="store_true", help="never let them go; without it they go after all others")
    pin.add_argument("--ttl", default="", metavar="TIME", help="until so long after their last use, such as 2h")
    _of_pages(_command(commands, "unpin", "let pages go again like all others"))
    evict = _command(commands, "evict", "drop pages, a namespace or tenant, or an amount of what is cold")
    _of_pages(evict)
    evict.add_argument("--tenant", default="", metavar="NAME", help="everything of this tenant")
    evict.add_argument("--bytes", default="", metavar="SIZE", help="so much of what is cold, on each node")
    verify = _command(commands, "verify", "check every page against its checksum, and drop what is rotten")
    verify.add_argument("nodes", nargs="*", metavar="NODE", help="ids or names (default: all nodes)")
    verify.add_argument("--bandwidth", default="", metavar="SIZE", help="bytes a second and node (default 512 MiB)")
    clear = _command(commands, "clear", "drop a namespace's pages on every node")
    clear.add_argument("namespace", nargs="+", metavar="DIGEST", help="as in status")
    text = "tokens that a pool of some size holds, from a model's config.json"
    capacity = commands.add_parser("capacity", help=text, description=text, allow_abbrev=False)
    capacity.add_argument("model", metavar="CONFIG", help="a model's config.json, or the directory that holds it")
    capacity.add_argument("--size", default="100gb", help="of the pool, such as 100gb (default)")
    capacity.add_argument("--dtype", default="bfloat16", help="of the KV cache (default bfloat16)")
    capacity.add_argument("--page-size", type=_at_least_one, default=64, metavar="N", help="tokens a page (default 64)")
    capacity.add_argument("--tp", type=_at_least_one, default=1, metavar="N", help="TP ranks: objects a page of MHA")
    capacity.add_argument("--json", action="store_true", help="for scripts")
    examine = _command(commands, "doctor", "what keeps the pool from working well, each with its remedy")
    examine.add_argument("--sglang", default="", metavar="ARGS", help="SGLang's command line, to be looked at too")


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--config", metavar="FILE", help="settings as JSON, TOML or YAML")
    for setting in SETTINGS:
        parser.add_argument(f"--{setting.replace('_', '-')}", metavar="VALUE", help="as in the node's settings")
    return parser


def _of_pages(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="*", metavar="KEY", help="a page hash, or an object key as ls prints its pieces")
    _prompt(parser)
    parser.add_argument("--namespace", action="append", default=[], metavar="DIGEST", help="only of this namespace")
    parser.add_argument("--on", action="append", default=[], metavar="NODE", help="only on this node, an id or name")


def _prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", metavar="FILE", help="token ids of a prompt as a JSON list, - for standard input")
    parser.add_argument(
        "--page-size", type=_at_least_one, metavar="N", help="tokens a page (default: what the namespaces in Redis say)"
    )
    parser.add_argument("--extra-key", default=None, help="the request's extra key, such as a LoRA id")
    parser.add_argument("--cache-salt", default=None, help="the request's cache salt")


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1 << 30):
        raise argparse.ArgumentTypeError(f"{text} is refused: a number from 1 on is expected")
    return int(text)
