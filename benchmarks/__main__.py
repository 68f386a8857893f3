"""``python -m benchmarks``: the benchmark of pages."""

from __future__ import annotations

from benchmarks.pages import main

main()
