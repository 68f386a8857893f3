"""What came back from a replay, a row a request, as a Parquet file; and what it was measured with, in the file's
metadata.

The columns are the fields of :class:`Row`, in order. The metadata has one key, ``hicache_mooncake.replay``, a JSON
object: ``schema`` (:data:`SCHEMA`), ``workload``, ``configuration``, ``clock``, ``started`` (Unix seconds),
``seconds``, ``options``, ``endpoint``, ``server`` (what it says of itself), ``metrics`` (counters of the server, by
which they grew), ``versions``, ``machine``, and whatever the caller added.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times are seconds since the run began, durations seconds; None: not known.

    ``due_s`` is when the workload wanted it, ``sent_s`` when it went out: between them it waited for the replay's
    own bound on requests in flight. ``ttft_s`` counts from ``due_s`` in an open loop (or a slow server would be
    asked less, and look faster: coordinated omission), from ``sent_s`` in a closed one, where nobody wanted it
    earlier; the last try counts, and time lost on earlier ones is in it. ``tbt_s`` is the mean of the longest tenth
    of the gaps between tokens (as Mooncake counts it). ``cached_*`` are prompt tokens by where their KV was found,
    as the server tells them; ``storage_wait_s``, ``queue_s`` and ``prefill_s`` are the server's own times, where it
    gives them: waiting for L3, then for its turn, and computing. ``answer`` is a digest of the output's tokens (or
    text), to see that two runs agree.
    """

    request_id: str
    session_id: str
    parent_id: str
    turn: int
    due_s: float
    sent_s: float
    first_token_s: float | None
    done_s: float
    ttft_s: float | None
    tbt_s: float | None
    tbt_mean_s: float | None
    tbt_max_s: float | None
    prompt_tokens: int
    output_tokens: int
    cached_known: bool
    cached_device: int
    cached_host: int
    cached_storage: int
    storage_wait_s: float | None
    queue_s: float | None
    prefill_s: float | None
    retries: int
    error: str
    answer: str

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.cached_device + self.cached_host + self.cached_storage
