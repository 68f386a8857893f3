"""The ``hicache-mooncake`` command."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from hicache_mooncake import __version__
from hicache_mooncake.config import Settings, default_text
from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError
from hicache_mooncake.node.stopping import StopRequest
from hicache_mooncake.operate import options, ssd_options

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 failed, 2 the settings cannot work."""
    given = _parser().parse_args(arguments)
    if given.command == "node":
        return _run_node(given)
    # What failed is printed by the command; the library's own warnings about it would say it again.
    logging.getLogger("hicache_mooncake").addHandler(logging.NullHandler())
    try:
        if given.command == "ssd":
            from hicache_mooncake.operate import ssd_commands  # noqa: PLC0415 - --help and --version need none of it

            status, text = ssd_commands.run(given)
            print(text)
            return status
        from hicache_mooncake.operate import commands  # noqa: PLC0415 - likewise

        return commands.run(given)
    except ConfigError as error:
        print(f"hicache-mooncake: {error}", file=sys.stderr)
        return 2
    except (HiCacheMooncakeError, OSError) as error:
        print(f"hicache-mooncake: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hicache-mooncake", description="Distributed L3 KV cache for SGLang HiCache.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hicache-mooncake {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "run this host's node until SIGTERM"
    node = commands.add_parser("node", help=text, description=text, allow_abbrev=False)
    node.add_argument("--config", metavar="FILE", help="settings as JSON, TOML or YAML")
    node.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    node.add_argument("--report-fd", type=int, default=-1, help=argparse.SUPPRESS)
    for setting in fields(Settings):
        default = default_text(setting.default, setting.metadata["allowed"])
        what = f"{setting.metadata['doc']} Allowed: {setting.metadata['allowed']}. Default: {default}."
        if setting.metadata["by"] == "engine":
            what += " Read by engines only."
        node.add_argument(
            "--" + setting.name.replace("_", "-"), metavar="VALUE", help=what.replace("`", "").replace("%", "%%")
        )
    options.add_commands(commands)
    ssd_options.add_commands(commands)
    return parser


def _run_node(given: argparse.Namespace) -> int:
    if given.embedded:
        settings_text = sys.stdin.read()
        _detach()
    logging.basicConfig(
        level=logging.INFO,
        format="[%(asctime)s hicache-mooncake %(process)d] %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    logging.raiseExceptions = not given.embedded  # the engine whose stderr we write to may be gone
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2, file=sys.stderr)  # a node that hangs tells where, without a debugger
    try:
        if given.embedded:
            settings = Settings.of(json.loads(settings_text))
        else:
            overrides = {s.name: getattr(given, s.name) for s in fields(Settings) if getattr(given, s.name) is not None}
            settings = Settings.load(overrides, file=given.config)
        from hicache_mooncake.node.service import Node  # noqa: PLC0415 - --help needs none of it

        sys.setswitchinterval(0.0005)  # many short lock-holding steps: waiting 5 ms for the GIL would triple p99
        node = Node(settings, embedded=given.embedded)
    except ConfigError as error:
        _report(given.report_fd, field=error.field, value=str(error.value), allowed=error.allowed, hint=error.hint)
        print(f"hicache-mooncake: {error}", file=sys.stderr)
        return 2
    except (HiCacheMooncakeError, OSError) as error:
        _report(given.report_fd, error=str(error))
        print(f"hicache-mooncake: {error}", file=sys.stderr)
        return 1
    _report(given.report_fd, state="ready", node=node.id)
    node.run(stop)
    logger.info("node %s stopped", node.id)
    return 0


def _detach() -> None:
    """Become a child of init: the engine's process tree is killed as a whole when it ends, and we serve others too."""
    if os.fork():
        os._exit(0)


def _report(descriptor: int, **content: Any) -> None:
    """Tell the engine that started us how it went."""
    if descriptor >= 0:
        with suppress(BrokenPipeError):  # it is gone: an embedded node ends by itself, others have their log
            os.write(descriptor, json.dumps(content).encode() + b"\n")
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
