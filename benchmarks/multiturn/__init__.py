"""Multi-turn agent traces replayed against a serving engine, and what each cache tier brings to the time to first
token.

``workload`` says what is asked, ``readers`` and ``generate`` make it from traces or from figures, ``tokens`` turns
block hashes into token ids, ``replay`` asks it of a server, ``results`` keeps what came back, ``figures`` and
``report`` say what it means. Run ``python -m benchmarks.multiturn --help``.
"""
