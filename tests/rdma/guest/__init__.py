"""A machine with RDMA where there is none: User Mode Linux with soft-RoCE, on the host's own files.

``python -m tests.rdma.guest COMMAND…`` runs a command in it, in this folder and with the same files, and exits with its
status. It has two devices, ``rxe0`` and ``rxe1``, at the ends of a virtual cable (10.8.0.1, 10.8.0.2), one processor,
and keeps nothing of what is written. System calls and page faults cost ten to a hundred times what they should: it
shows what is right, and ratios of speed, never speeds.
"""

from __future__ import annotations

import lzma
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KERNEL = ROOT / ".cache" / "uml-linux"
CACHED = ROOT.parent / "shared" / "rdma" / "uml-linux.xz"
"""A kernel that somebody has built already, if there is one: it only saves the twelve minutes."""

NEEDED = {"busybox": "busybox-static", "ip": "iproute2", "rdma": "iproute2"}
PASSED_ON = ("PYTHONPATH", "VIRTUAL_ENV", "CI", "HYPOTHESIS_PROFILE")
MEMORY_MIB = 3072
TIMEOUT = 900.0


class CannotRun(Exception):
    """Why there can be no guest on this host, and what to do about it."""


def kernel() -> Path:
    """The guest's kernel; unpacked from the cache when it is not there yet. Raises :class:`CannotRun`."""
    missing = sorted({package for command, package in NEEDED.items() if shutil.which(command) is None})
    if not any(Path(folder).glob("libibverbs.so.1") for folder in _library_folders()):
        missing += ["libibverbs1", "ibverbs-providers"]
    if missing:
        raise CannotRun(f"apt-get install --no-install-recommends {' '.join(missing)}")
    if not KERNEL.exists() and CACHED.exists():
        KERNEL.parent.mkdir(exist_ok=True)
        fresh = KERNEL.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(lzma.decompress(CACHED.read_bytes()))
        fresh.chmod(0o755)
        fresh.rename(KERNEL)
    if not KERNEL.exists():
        raise CannotRun(f"there is no kernel for it: {HERE / 'build_kernel.sh'} {KERNEL} (12 minutes of CPU)")
    return KERNEL


def _library_folders() -> list[str]:
    return ["/usr/lib64", "/usr/lib", *map(str, Path("/usr/lib").glob("*-linux-gnu"))]


def _memory_folder() -> str:
    """Where the guest's memory is, which is a file: in memory too, unless a container has left too little there."""
    try:
        enough = shutil.disk_usage("/dev/shm").free >= MEMORY_MIB << 20
    except OSError:
        enough = False
    return "/dev/shm" if enough else tempfile.gettempdir()


def run(command: list[str], *, timeout: float = TIMEOUT) -> int:
    """Run a command in a guest, its output on ours; returns its status. Raises :class:`CannotRun`."""
    linux = kernel()
    with tempfile.TemporaryDirectory(prefix="hcm-guest-") as folder:
        lines = [f"cd {shlex.quote(os.getcwd())}"]
        lines += [f"export {name}={shlex.quote(os.environ[name])}" for name in PASSED_ON if name in os.environ]
        # The host's folders for it are not the guest's to write, or not there.
        lines += ["export PYTHONDONTWRITEBYTECODE=1", shlex.join(command)]
        Path(folder, "command").write_text("\n".join(lines) + "\n")
        arguments = [
            str(linux),
            f"mem={MEMORY_MIB}M",
            "root=/dev/root",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            f"init={HERE / 'init.sh'}",
            f"guest_dir={folder}",
            "con=null",
            "con0=fd:0,fd:1",
            "quiet",
            "loglevel=1",
        ]
        environment = {**os.environ, "TMPDIR": _memory_folder()}
        machine = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
        try:
            machine.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"the guest was ended after {timeout:.0f} s", file=sys.stderr)
            return 124
        finally:
            if machine.poll() is None:  # with the processes in which it runs the guest's
                os.killpg(machine.pid, signal.SIGKILL)
                machine.wait()
        status = Path(folder, "status")
        if not status.exists():
            print(f"the guest ended without a status ({machine.returncode})", file=sys.stderr)
            return 125
        return int(status.read_text())
