"""The options of ``hicache-mooncake ssd``."""

from __future__ import annotations

from typing import Any


def add_commands(commands: Any) -> None:
    """Add ``ssd`` and what is under it."""
    text = "look at, check and repair an SSD directory or device that no node uses"
    parser = commands.add_parser("ssd", help=text, description=text, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    for name, what in (
        ("inspect", "what is stored there, by namespace"),
        ("verify", "read everything and compare it with its checksums; what does not match is removed"),
        ("compact", "give back disk space that holds nothing any more"),
    ):
        action = actions.add_parser(name, help=what, description=what, allow_abbrev=False)
        action.add_argument("path", help="directory, file or device")
        action.add_argument("--json", action="store_true", help="for scripts")
        if name == "verify":
            action.add_argument("--bandwidth", default="0", metavar="SIZE", help="bytes a second at most; default: all")
    what = "copy what is stored in one place into another, of any store"
    action = actions.add_parser("import", help=what, description=what, allow_abbrev=False)
    action.add_argument("source", help="directory, file or device to read")
    action.add_argument("path", help="directory, file or device to write; created if missing")
    action.add_argument("--store", default="bucket", help="layout of the new one; default: bucket")
    action.add_argument("--size", required=True, metavar="SIZE", help="capacity of the new one: bytes, 512MiB, 4gb")
    action.add_argument("--pool", help="pool of the new one; default: that of the source")
    action.add_argument("--json", action="store_true", help="for scripts")
