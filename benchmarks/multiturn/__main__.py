"""``python -m benchmarks.multiturn``: replay traces, report and compare what came back, look into traces, convert
them."""

from __future__ import annotations

import sys

try:
    from benchmarks.multiturn.commands import main
except ModuleNotFoundError as absent:
    sys.exit(f"{absent.name} is not installed in {sys.prefix}\nhint: pip install -e '.[bench]', or make venv")

if __name__ == "__main__":
    main()
