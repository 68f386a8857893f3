"""``python -m tests.rdma.guest COMMAND…``: run a command in the guest."""

from __future__ import annotations

import sys

from tests.rdma.guest import CannotRun, run

try:
    sys.exit(run(sys.argv[1:] or ["bash", "-c", "rdma link"]))
except CannotRun as error:
    sys.exit(f"the RDMA guest cannot run: {error}")
