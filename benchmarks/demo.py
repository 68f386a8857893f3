"""The pool at work in a few minutes: ``python -m benchmarks.demo``, or ``make demo``.

A real SGLang server answers the turns of one conversation, first without the pool, then with it: cold, after its own
caches were emptied, after it was killed and started again, and on a second node. By default SGLang runs a tiny model on
the CPU; with ``--model`` it runs yours on this machine's GPUs. Everything that is started is stopped at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

try:
    from benchmarks.demo_conversation import Conversation, Phase, Turn, complaints
    from benchmarks.demo_machines import (
        POOL,
        Contents,
        DemoFailed,
        DemoNode,
        UserServer,
        close_cpu_servers,
        contents,
        cpu_server,
        usable_gpu,
    )
    from benchmarks.demo_screen import Screen, show_pool, show_summary, show_table
    from hicache_mooncake import __version__
    from hicache_mooncake.errors import HiCacheMooncakeError
    from hicache_mooncake.metadata.directory import Directory
    from hicache_mooncake.metadata.redis_server import PrivateRedis
    from testbed import environment
    from testbed.models import write_llama
    from testbed.server import ServerFailed, SGLangServer, prompt_ids
except ModuleNotFoundError as absent:
    sys.exit(f"demo failed: {absent.name} is not installed in {sys.prefix}\nhint: make demo installs everything first")

_WARM_UP_TOKENS = 384
"""Another conversation's prompt, that every server answers first: SGLang's first question to any L3, which it asks from
256 tokens on, takes it 0.1 s more than all later ones."""

_LAYERS, _HIDDEN = 8, 512
"""The tiny model: heavy enough for a CPU that computing a prompt takes seconds."""

_SHORTEST = 1024
"""Tokens of the longest prompt at least: SGLang asks L3 for no fewer than 256."""


@dataclass(frozen=True)
class Plan:
    """What is run: the conversation, and with which model; empty: a tiny one on the CPU."""

    conversation: Conversation
    model: str
    launch_args: tuple[str, ...]
    segment_size: str

    @property
    def title(self) -> str:
        what = self.model or f"a Llama of {_LAYERS} layers, hidden size {_HIDDEN}, on one CPU core"
        return f"One conversation of {self.conversation.turns} turns: {what}"

    @property
    def steps(self) -> int:
        """A server's start and every turn, for each of five phases; the flushed one needs no start."""
        return 5 * self.conversation.turns + 4 + 1  # the nodes come first


class Demo:
    """One run. What it starts is registered with ``undo``."""

    def __init__(self, plan: Plan, screen: Screen, directory: Path, undo: ExitStack) -> None:
        self.plan = plan
        self.screen = screen
        self.directory = directory
        self.undo = undo
        self.answers: list[tuple[int, ...]] = []
        self.redis = PrivateRedis()
        self.nodes: list[DemoNode] = []
        self.pages_over_tcp = 0

    def run(self) -> tuple[Phase, list[Phase]]:
        """The phase that everything is held against, and the others."""
        self._start_nodes()
        here, there = self.nodes
        if not self.plan.model:
            self.screen.note("importing SGLang, once for all servers on the CPU")
        reference = self._without_pool()
        server = self._started_server("first", here)
        phases = [
            self._converse(server, "cold", "cold", flush=False, from_pool=False),
            self._converse(server, "flush", "after a flush"),
        ]
        server.wait_for_backup()
        server.kill()
        self._start(server, "SGLang was killed: starting it again")
        phases.append(self._converse(server, "restart", "after a restart"))
        server.kill()
        server = self._started_server("second", there)
        before = _read_over_tcp(there)
        phases.append(self._converse(server, "second_node", "on a second node"))
        self.pages_over_tcp = _read_over_tcp(there) - before
        server.kill()
        return reference, phases

    def _start_nodes(self) -> None:
        self.screen.doing("starting Redis and two nodes")
        self.undo.callback(self.redis.stop)
        self.redis.start()
        for name in ("a", "b"):
            node = DemoNode(name, self.directory, self.redis.url, self.plan.segment_size)
            self.nodes.append(node)
            self.undo.callback(node.stop)
            node.start()
        with closing(Directory(self.redis.url, POOL)) as directory:
            ids = [node.wait_until_listed(directory) for node in self.nodes]
        self.screen.step()
        self.screen.note(f"Redis and the nodes {' and '.join(ids)} are up")

    def _without_pool(self) -> Phase:
        """The turns computed whole; their answers become part of the conversation."""
        server = self._started_server("without the pool", None)
        phase = self._converse(server, "without_pool", "without the pool", from_pool=False)
        self.answers = [turn.output for turn in phase.turns]
        server.kill()
        return phase

    def _started_server(self, name: str, node: DemoNode | None) -> SGLangServer:
        extra = None if node is None else {"node": node.socket, "pool": POOL}
        server = self._server(extra, self.directory / f"server-{name.replace(' ', '-')}.log")
        where = f"server at node {node.name}" if node else "server without the pool"
        self.undo.callback(server.kill)
        self._start(server, f"starting SGLang: {where}")
        self.screen.note(f"SGLang is up, a {where}")
        return server

    def _start(self, server: SGLangServer, what: str) -> None:
        """Start it and let it do what it does once. Loading a model of the user's can take minutes: show its log."""
        self.screen.doing(what)
        server.start(progress=lambda line: self.screen.doing(f"{what}: {line}") if self.plan.model else None)
        server.generate(prompt_ids(-1, _WARM_UP_TOKENS), 4, stream=True)
        self.screen.step()

    def _server(self, extra: dict[str, Any] | None, log: Path) -> SGLangServer:
        plan = self.plan
        if plan.model:
            return UserServer(plan.model, plan.launch_args, extra, log)
        model = self.directory / "model"
        room = 2 * (plan.conversation.longest + plan.conversation.answer)
        if not model.exists():
            write_llama(model, layers=_LAYERS, hidden=_HIDDEN, heads=8, kv_heads=4, context=room)
        return cpu_server(model, room, extra, log)

    def _converse(
        self, server: SGLangServer, key: str, name: str, *, flush: bool = True, from_pool: bool = True
    ) -> Phase:
        """All turns at one server; ``flush`` its own tiers before each, as if other conversations had pushed it out."""
        conversation = self.plan.conversation
        turns: list[Turn] = []
        for number in range(conversation.turns):
            prompt = conversation.prompt(number, self.answers or [turn.output for turn in turns])
            self.screen.doing(f"{name}: turn {number + 1} of {conversation.turns}, {len(prompt):,} tokens")
            if flush:
                server.flush()
            turns.append(Turn.of(server.generate(prompt, conversation.answer, stream=True, within=600)))
            self.screen.step()
        phase = Phase(key, name, tuple(turns), from_pool)
        self.screen.note(f"{name}: {1000 * phase.mean_ttft:,.0f} ms to the first token, on average")
        return phase


def _read_over_tcp(node: DemoNode) -> int:
    return int(node.counters().get("get_remote", 0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status: 0 done, 1 failed or an answer was wrong, 2 wrong usage, 130 interrupted."""
    given = _parse(arguments)
    plan = _plan(given)
    screen = Screen(plan.steps)
    directory = Path(tempfile.mkdtemp(prefix="hcm-demo-"))
    undo = ExitStack()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, signal.default_int_handler)
    failed = False
    try:
        with screen:
            _prepare(plan, screen, undo)
            demo = Demo(plan, screen, directory, undo)
            reference, phases = demo.run()
        return _show(demo, reference, phases, given)
    except KeyboardInterrupt:
        screen.note("interrupted: stopping what was started")
        return 130
    except (DemoFailed, ServerFailed, HiCacheMooncakeError, OSError, RuntimeError) as error:
        failed = any(directory.glob("*.log"))
        message, hint = _explained(error)
        screen.fail(message, "; ".join(filter(None, [hint, f"the logs are in {directory}" * failed])))
        return 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # what is left to do takes seconds, and must be done
        undo.close()
        if not failed:
            shutil.rmtree(directory, ignore_errors=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description=(__doc__ or "").partition("\n\n")[2].replace("``", "")
    )
    parser.add_argument("--quick", action="store_true", help="three turns and shorter prompts: about half a minute")
    parser.add_argument("--model", default="", metavar="PATH", help="your model, on this machine's GPUs")
    parser.add_argument(
        "--launch-args", default="", metavar="WORDS", help="more flags of sglang.launch_server for --model, in one word"
    )
    parser.add_argument("--turns", type=int, metavar="N", help="turns of the conversation (5; 3 with --quick)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of the last turn's prompt")
    parser.add_argument("--segment-size", metavar="SIZE", help="DRAM of each node (512MiB; 8GiB with --model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--keep", action="store_true", help="keep Redis and the nodes up at the end, until Ctrl-C")
    given = parser.parse_args(arguments)
    if given.turns is not None and given.turns < 2:
        parser.error("--turns: a conversation has at least 2")
    if given.tokens is not None and given.tokens < _SHORTEST:
        parser.error(f"--tokens: at least {_SHORTEST}")
    if given.json and not given.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no directory {given.json.absolute().parent}")
    if given.launch_args and not given.model:
        parser.error("--launch-args goes with --model")
    return given


def _plan(given: argparse.Namespace) -> Plan:
    turns = given.turns or (3 if given.quick else 5)
    longest = given.tokens or (16384 if given.model else 2048 if given.quick else 6144)
    return Plan(
        conversation=Conversation(turns, longest),
        model=given.model,
        launch_args=tuple(shlex.split(given.launch_args)),
        segment_size=given.segment_size or ("8GiB" if given.model else "512MiB"),
    )


def _prepare(plan: Plan, screen: Screen, undo: ExitStack) -> None:
    """Look whether it can work and do what is done once. Raises :class:`DemoFailed`."""
    if reason := environment.missing():
        raise DemoFailed(reason, "make demo installs everything into .venv first")
    if plan.model:
        screen.doing("looking for a GPU")
        if not usable_gpu():
            raise DemoFailed(
                "--model needs a GPU, and torch.cuda.is_available() is false here",
                "without --model the demo runs a tiny model on the CPU",
            )
        if plan.model.startswith(("/", ".", "~")) and not Path(plan.model).is_dir():
            raise DemoFailed(f"--model: {plan.model} is no directory", "give a model's directory or its name on a hub")
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there is a GPU, the tiny model stays off it
    screen.doing("SGLang's page hash: built once, in half a minute")
    environment.build_page_hash()
    undo.callback(close_cpu_servers)


def _explained(error: Exception) -> tuple[str, str]:
    """The error in one line, and a hint."""
    if isinstance(error, DemoFailed):
        return str(error), error.hint
    if isinstance(error, HiCacheMooncakeError):
        return error.message, error.hint
    head, _, log = str(error).partition("\n")
    telling = [line.strip() for line in log.splitlines() if "Error" in line or "error:" in line]
    head = head.removesuffix("; the end of its log:").removesuffix("; the end of the log:")
    hint = "--tokens makes the conversation shorter" if "context length" in str(error) else ""
    return (f"{head}: {telling[-1]}" if telling else head), hint


def _show(demo: Demo, reference: Phase, phases: list[Phase], given: argparse.Namespace) -> int:
    time.sleep(1.0)  # two heartbeats: what the nodes say of themselves in Redis is then current
    pool = contents(demo.redis.url)
    found = complaints(reference, phases)
    if not demo.pages_over_tcp:
        found.append("on a second node: no page crossed TCP")
    show_table(demo.plan.title, reference, phases)
    show_summary(reference, phases, demo.pages_over_tcp, found)
    if found and demo.plan.model:
        print("On a GPU rounding may depend on what was cached: try --launch-args '--enable-deterministic-inference'.")
    show_pool(demo.redis.url, pool, kept=given.keep)
    print(f"\n{demo.screen.seconds:.0f} s in all.")
    if given.json:
        given.json.write_text(json.dumps(_report(demo, reference, phases, pool, found), indent=1) + "\n")
    if given.keep:
        _hold(demo)
    return 1 if found else 0


def _report(demo: Demo, reference: Phase, phases: list[Phase], pool: Contents, found: list[str]) -> dict[str, Any]:
    plan = demo.plan
    return {
        "version": __version__,
        "model": plan.model or f"llama {_LAYERS}x{_HIDDEN} on a CPU",
        "seconds": round(demo.screen.seconds, 1),
        "phases": [
            {
                "phase": phase.key,
                "mean_ttft_ms": round(1000 * phase.mean_ttft, 1),
                "times_faster": round(reference.mean_ttft / phase.mean_ttft, 2),
                "turns": [
                    {
                        "prompt_tokens": turn.prompt,
                        "device": turn.device,
                        "host": turn.host,
                        "pool": turn.pool,
                        "computed": turn.computed,
                        "ttft_ms": round(1000 * turn.ttft, 1),
                        "times_faster": round(base.ttft / turn.ttft, 2),
                        "output_ids": list(turn.output),
                    }
                    for turn, base in zip(phase.turns, reference.turns, strict=True)
                ],
            }
            for phase in (reference, *phases)
        ],
        "outputs_equal": not any("differs" in complaint for complaint in found),
        "complaints": found,
        "pages_over_tcp": demo.pages_over_tcp,
        "pool": asdict(pool),
    }


def _hold(demo: Demo) -> None:
    """Wait for Ctrl-C, which is the end that was asked for."""
    extra = shlex.quote(json.dumps({"node": demo.nodes[0].socket, "pool": POOL}))
    print("Redis and the nodes stay up until Ctrl-C. A server of your own joins them at node a with")
    print("  --enable-hierarchical-cache --hicache-storage-backend mooncake \\")
    print(f"  --hicache-storage-backend-extra-config {extra}", flush=True)
    try:
        while all(node.alive for node in demo.nodes):
            time.sleep(0.5)
        print("A node has ended.", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nstopping", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
