"""Made-up runs with known figures, written as the replay writes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from benchmarks.multiturn.results import Row, Run, Writer, read_run

PER_TOKEN, PER_PAIR, BASE = 1e-4, 1e-9, 0.01


def prefill(new: int, prefix: int) -> float:
    """What computing costs in these runs."""
    return BASE + PER_TOKEN * new + PER_PAIR * new * (prefix + (new + 1) / 2)


def write_run(path: Path, name: str, cached: Callable[[int, int], int], *, clients: int = 8, turns: int = 5) -> Run:
    """One request after the other, 1,000 new tokens a turn; ``cached(client, turn)`` of them come from the pool."""
    source = random.Random(name)
    writer = Writer(path)
    at = 0.0
    for turn in range(1, turns + 1):
        for client in range(clients):
            tokens = 1000 * turn
            hit = cached(client, turn)
            computed = prefill(tokens - hit, hit)
            ttft = computed * source.uniform(1.0, 1.1) + 0.002
            row = Row(
                request_id=f"c{client}/{turn}", session_id=f"c{client}", parent_id="", turn=turn, due_s=at, sent_s=at,
                first_token_s=at + ttft, done_s=at + ttft + 0.1, ttft_s=ttft, tbt_s=0.05, tbt_mean_s=0.04,
                tbt_max_s=0.05, prompt_tokens=tokens, output_tokens=3, cached_known=True, cached_device=0,
                cached_host=0,
                cached_storage=hit, storage_wait_s=hit * 1e-6, queue_s=0.0, prefill_s=computed, retries=0, error="",
                answer=f"{client} {turn}",
            )  # fmt: skip
            writer.add(row)
            at += ttft + 0.2
    metadata = {
        "workload": {"name": "made up"},
        "configuration": name,
        "clock": "sent",
        "seconds": at,
        "options": {"loop": "closed", "in_flight": 1},
        "server": {"chunked_prefill_size": 8192},
        "metrics": {"sglang:load_back_tokens_total": 10.0, "sglang:load_back_bytes_total": 1000.0},
    }
    writer.close({**metadata, "pool": {"hicache_mooncake_request_seconds_sum{exists}": 0.25}})
    return read_run(path)
