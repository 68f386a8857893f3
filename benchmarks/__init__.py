"""What this package costs and what it saves, measured on real processes: run ``python -m benchmarks.pages``."""
