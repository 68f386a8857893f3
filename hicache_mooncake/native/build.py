"""Compiles ``copying.c`` beside itself: ``python -m hicache_mooncake.native.build``. Run when the package is installed.

Uses nothing of the package, and no Python header: the library is called through ctypes and fits every Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "copying.c"


def library() -> Path:
    """Where the library of this very source lies, or would lie: one of another version is never loaded.

    Raises ``OSError`` when the source is not there.
    """
    return HERE / f"libcopying-{zlib.crc32(SOURCE.read_bytes()):08x}.so"


def compiler() -> list[str] | None:
    """The C compiler to use: ``CC``, that of Python itself, or whatever is called ``cc``, ``gcc`` or ``clang``."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        words = str(command or "").split()
        if words and shutil.which(words[0]):
            return words
    return None


def build() -> str:
    """Compile; the reason why not, or an empty string."""
    cc = compiler()
    if cc is None:
        return "there is no C compiler"
    target = library()
    half_done = target.with_suffix(f".{os.getpid()}")
    command = [*cc, "-O2", "-std=gnu11", "-fPIC", "-shared", "-o", str(half_done), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            return done.stderr.strip() or f"{cc[0]} ended with {done.returncode}"
        half_done.replace(target)  # at once: a node that starts meanwhile finds all of it or nothing
        for old in HERE.glob("libcopying-*.so"):
            if old != target:
                old.unlink(missing_ok=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        half_done.unlink(missing_ok=True)
    return ""


if __name__ == "__main__":
    sys.exit(build() or 0)
