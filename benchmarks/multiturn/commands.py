"""The commands of ``python -m benchmarks.multiturn``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.multiturn import wording
from benchmarks.multiturn.charts import charts, svg, write_pngs
from benchmarks.multiturn.convert import write_mooncake
from benchmarks.multiturn.cost_profile import load_profile
from benchmarks.multiturn.figures import Limits
from benchmarks.multiturn.ideal import contents
from benchmarks.multiturn.page import write_page
from benchmarks.multiturn.replay import Endpoint, Options, replay
from benchmarks.multiturn.report import Report, as_json, report
from benchmarks.multiturn.results import read_run
from benchmarks.multiturn.screen import ReplayProgress, show
from benchmarks.multiturn.selection import add_arguments, vocabulary, workload_of
from benchmarks.multiturn.tiers import COLUMNS, DEFAULT_COLUMNS, Bench, Sizes, run_columns
from hicache_mooncake import config_values
from hicache_mooncake.errors import ConfigError, HiCacheMooncakeError
from testbed.server import ServerFailed

_ABOUT = """Ask a server what traces of agents and conversations ask, and see what each cache tier brings to the time to
the first token.

  stats    what is in a trace, and what an endless cache would hit of it
  run      start SGLang with one cache tier more each time, ask each the same, and report: all in one
  replay   ask a running server (SGLang or any with an OpenAI API); writes a Parquet file
  report   one or more of these files side by side: terminal, HTML page, PNGs
  compare  two of them: ratios with 95 % intervals
  convert  a trace as Mooncake JSONL"""


def main(words: Sequence[str] | None = None) -> None:
    """Run a command; errors that a user can mend are one line and exit status 1."""
    given = _parser().parse_args(words)
    try:
        given.run(given)
    except HiCacheMooncakeError as error:
        sys.exit(f"error: {error}")
    except (OSError, ServerFailed) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.multiturn", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    stats = commands.add_parser("stats", help="what is in a trace", usage="%(prog)s [--trace FILE] [...]")
    add_arguments(stats)
    stats.add_argument("--json", action="store_true", help="for programs")
    stats.set_defaults(run=_stats)

    whole = commands.add_parser("run", help="compare the cache tiers", usage="%(prog)s --out FOLDER [...] [-- WORDS]")
    whole.add_argument("--out", type=Path, required=True, help="folder for the runs and the report")
    whole.add_argument("--columns", default=",".join(DEFAULT_COLUMNS), help=f"of {', '.join(COLUMNS)}")
    whole.add_argument("--model", help="a model for SGLang on a GPU (default: a tiny one on the CPU)")
    whole.add_argument("--segment", default="", help="with --model: DRAM of the pool, such as 80gb")
    whole.add_argument("--ssd-directory", type=Path, default=Path("/var/tmp"), help="on the disk of the SSD tier")
    whole.add_argument("--in-flight", type=int, default=1, help="requests at a time (default 1)")
    whole.add_argument("--vocabulary", default="", help="token ids that blocks become (default: what the model has)")
    whole.add_argument("--json", type=Path, metavar="FILE", help="write everything for programs")
    whole.add_argument("words", nargs="*", help="after --: further arguments of sglang.launch_server")
    add_arguments(whole)
    whole.set_defaults(run=_run)

    ask = commands.add_parser("replay", help="ask a server", usage="%(prog)s --url URL --out FILE [...]")
    ask.add_argument("--url", required=True, help="the server, as in http://127.0.0.1:30000")
    ask.add_argument("--out", type=Path, required=True, help="the Parquet file to write")
    ask.add_argument("--name", default="", help="what to call this run in reports, as in L1+L2")
    ask.add_argument("--api", choices=("sglang", "openai"), default="sglang", help="/generate or /v1/completions")
    ask.add_argument("--model", default="", help="openai: the model's name (default: the first that the server lists)")
    ask.add_argument("--api-key-file", type=Path, help="a file with the server's API key")
    ask.add_argument(
        "--pool-metrics", action="append", default=[], help="metrics page of a node of the pool; again for more"
    )
    ask.add_argument(
        "--loop", choices=("open", "closed"), default="closed", help="by the trace's clock, or by think times"
    )
    ask.add_argument("--in-flight", type=int, default=4, help="requests at a time, at most (default 4)")
    ask.add_argument("--at-a-time", type=int, default=0, help="closed loop: sessions at a time (default all)")
    ask.add_argument(
        "--rate", type=float, default=0.0, help="closed loop: requests a second, at most, at Poisson times"
    )
    ask.add_argument("--vocabulary", default="1000:30000", help="token ids that blocks become (default 1000:30000)")
    ask.add_argument("--form", choices=("ids", "text"), default="ids", help="send blocks as token ids, or as text")
    ask.add_argument("--output-tokens", type=int, default=0, help="tokens an answer, instead of the workload's")
    ask.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take, retries and all")
    ask.add_argument("--retries", type=int, default=2, help="tries more after errors that may pass")
    ask.add_argument("--json", action="store_true", help="print the summary for programs")
    add_arguments(ask)
    ask.set_defaults(run=_replay)

    for name, run, about in (
        ("report", _report, "runs side by side"),
        ("compare", _compare, "two runs, with intervals"),
    ):
        made = commands.add_parser(name, help=about)
        made.add_argument("runs", type=Path, nargs="+" if name == "report" else 2, help="files that replay wrote")
        made.add_argument("--ttft-limit", type=float, default=2.0, help="seconds to the first token of a good request")
        made.add_argument("--tbt-limit", type=float, default=0.2, help="seconds between its tokens (default 0.2)")
        made.add_argument("--profile", help="what prefill costs, by name or TOML file (default: fitted to the runs)")
        made.add_argument("--json", type=Path, metavar="FILE", help="write everything for programs, - for stdout")
        if name == "report":
            made.add_argument("--out", type=Path, help="folder for report.html and the charts as PNG")
        made.set_defaults(run=run)

    change = commands.add_parser("convert", help="a trace as Mooncake JSONL")
    add_arguments(change)
    change.add_argument("--out", type=Path, required=True, help="the file to write")
    change.add_argument("--block", type=int, default=512, help="tokens a block (default 512)")
    change.set_defaults(run=_convert)
    return parser


def _stats(given: argparse.Namespace) -> None:
    workload = workload_of(given, grouped=False)
    with ReplayProgress("reading") as progress:
        found = contents(workload, lambda read: progress(read, workload.requests, ""))
    facts: dict[str, Any] = {
        **asdict(found),
        "block_hit_ratio": found.block_hit_ratio,
        "token_hit_ratio": found.token_hit_ratio,
        "notes": dict(workload.notes),
    }
    if given.json:
        print(json.dumps({"workload": workload.name, **facts}, indent=1))
        return
    print(workload.name)
    print(f"  {found.requests:,} requests of {found.sessions:,} sessions, {found.longest_session} turns at most")
    print(f"  {found.prompt_tokens:,} prompt tokens, {found.tokens_unique:,} of them unique")
    print(f"  {found.longest_prompt:,} tokens in the longest prompt")
    print(f"  {found.output_tokens:,} output tokens; arrivals over {found.seconds:,.0f} s")
    hits = f"{found.block_hit_ratio:.1%} of blocks, {found.token_hit_ratio:.1%} of tokens"
    print(f"  an endless cache hits {hits}")
    for note, times in workload.notes.items():
        print(f"  {note}: {times}")


def _run(given: argparse.Namespace) -> None:
    if given.model is None and given.trace is None and not given.quick:
        given.clients, given.rounds, given.tokens = min(given.clients, 8), min(given.rounds, 6), min(given.tokens, 512)
    workload = workload_of(given, grouped=True)
    found = contents(workload)
    sizes = Sizes.for_cpu(found.longest_prompt + 64, found.tokens_unique, given.in_flight)
    if given.model is not None:
        if not given.segment:
            raise ConfigError("segment", "", "with --model the DRAM of the pool, such as --segment 80gb")
        sizes = replace(sizes, segment=config_values.size(given.segment), ssd=0)
    words = vocabulary(given.vocabulary or ("3:500" if given.model is None else "1000:30000"))
    options = Options(in_flight=given.in_flight, vocabulary=words)
    with tempfile.TemporaryDirectory(prefix="hicache-mooncake-multiturn-") as directory:
        bench = Bench(
            Path(directory),
            given.out,
            sizes,
            options,
            given.model,
            given.words,
            found.longest_prompt,
            given.ssd_directory,
        )
        with ReplayProgress("tiers") as progress:
            done = run_columns(bench, [name for name in given.columns.split(",") if name], workload, progress)
    given.runs = [summary.path for summary in done]
    given.ttft_limit, given.tbt_limit, given.profile = 2.0, 0.2, None
    _report(given)


def _replay(given: argparse.Namespace) -> None:
    workload = workload_of(given, grouped=given.loop == "closed")
    key = given.api_key_file.read_text().strip() if given.api_key_file else ""
    endpoint = Endpoint(given.url, given.api, given.model, key, tuple(given.pool_metrics))
    options = Options(
        loop=given.loop,
        in_flight=given.in_flight,
        sessions=given.at_a_time,
        rate=given.rate,
        vocabulary=vocabulary(given.vocabulary),
        form=given.form,
        output_tokens=given.output_tokens,
        request_timeout=given.timeout,
        retries=given.retries,
    )
    with ReplayProgress(given.name or workload.name) as progress:
        done = replay(workload, endpoint, options, given.out, configuration=given.name, progress=progress)
    if given.json:
        print(json.dumps(asdict(done), default=str))
        return
    failed = f", {done.failed} failed" if done.failed else ""
    retried = f", {done.retried} tried again" if done.retried else ""
    print(f"{done.requests} requests in {done.seconds:.1f} s{failed}{retried}: {done.path}")


def _made(given: argparse.Namespace) -> Report:
    runs = [read_run(path) for path in given.runs]
    profile = load_profile(given.profile) if given.profile else None
    made = report(runs, Limits(given.ttft_limit, given.tbt_limit), profile)
    if given.json:
        content = json.dumps(as_json(made), indent=1)
        if str(given.json) == "-":
            print(content)
        else:
            given.json.write_text(content + "\n")
    return made


def _report(given: argparse.Namespace) -> None:
    made = _made(given)
    if str(given.json) != "-":
        tables = [wording.overall(made), wording.ttft_by_turn(made), wording.hits_by_turn(made)]
        show(made, [*tables, wording.benefits(made), wording.tier_traffic(made)])
    if given.out:
        drawn = charts(made)
        write_pngs(drawn, given.out)
        write_page(made, {name: svg(chart) for name, chart in drawn.items()}, given.out / "report.html")
        print(f"{given.out / 'report.html'}", file=sys.stderr)


def _compare(given: argparse.Namespace) -> None:
    made = _made(given)
    if str(given.json) == "-":
        return
    show(made, [wording.comparisons(made)])
    found = made.columns[1].against_first
    if found:
        how = "compared pairwise" if found.paired else "not the same requests: compared as samples"
        print(f"{found.pairs} requests in both runs, {how}; {found.answers_equal} answers equal")


def _convert(given: argparse.Namespace) -> None:
    written = write_mooncake(workload_of(given, grouped=False), given.out, given.block)
    print(f"{written} requests: {given.out}")
