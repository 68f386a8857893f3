"""Each trace format: a small sample becomes the sessions it tells of, and a malformed one is named by file, line,
field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.multiturn import shape
from benchmarks.multiturn.ideal import contents
from benchmarks.multiturn.readers import FORMATS, read_workload
from benchmarks.multiturn.readers.fields import MalformedTrace
from benchmarks.multiturn.tokens import Vocabulary
from benchmarks.multiturn.workload import Blocks, Session, Text
from hicache_mooncake.errors import ConfigError
from hicache_mooncake.radix_bridge import page_hashes

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
HITS = 0.382
"""Of whole blocks; 36.6 % with the cut ones, which seldom come again."""

real = pytest.mark.skipif(not TRACES.exists(), reason="the traces are not here")


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sessions(name: str, path: Path) -> list[Session]:
    return list(read_workload(name, path).sessions())


def mooncake(at: int, length: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": at, "input_length": length, "output_length": 7, "hash_ids": ids}


def test_mooncake_requests_have_times_blocks_and_turns(tmp_path: Path) -> None:
    records = [mooncake(1000, 1100, [0, 1, 2]), mooncake(1500, 600, [0, 9]), mooncake(3000, 1700, [0, 1, 3, 4])]
    first, other, second = sessions("mooncake", jsonl(tmp_path / "t.jsonl", records))
    assert [session.turns[0].at for session in (first, other, second)] == [0.0, 0.5, 2.0]
    assert first.turns[0].prompt == (Blocks("mooncake", (0, 1, 2), 512, 1100),)
    assert (second.id, second.turns[0].number) == (first.id, 2), "it goes on behind the first prompt's last whole block"
    assert (other.id == first.id, other.turns[0].number) == (False, 1), "a shared first block is no conversation"
    (joined, _) = shape.grouped(read_workload("mooncake", tmp_path / "t.jsonl")).sessions()
    assert [(turn.number, turn.think) for turn in joined.turns] == [(1, 0.0), (2, 2.0)]


def test_bailian_chats_follow_their_parents(tmp_path: Path) -> None:
    def chat(number: int, parent: int, at: float, turn: int) -> dict[str, Any]:
        ids = {"chat_id": number, "parent_chat_id": parent, "timestamp": at, "type": "text", "turn": turn}
        return {**ids, "input_length": 20, "output_length": 3, "hash_ids": [5, number]}

    trace = jsonl(tmp_path / "q.jsonl", [chat(1, -1, 5, 1), chat(2, 1, 6, 2), chat(3, 1, 7, 2), chat(4, 99, 8, 6)])
    found = [(session.id, session.turns[0].number) for session in sessions("bailian", trace)]
    assert found == [("chat 1", 1), ("chat 1", 2), ("chat 3", 2), ("chat 4", 6)]
    assert sessions("bailian", trace)[0].turns[0].prompt == (Blocks("bailian", (5, 1), 16, 20),)


def agentic(**changes: Any) -> dict[str, Any]:
    def request(at: float, length: int, ids: list[int], **more: Any) -> dict[str, Any]:
        return {"t": at, "type": "n", "model": "m", "in": length, "out": 5, "hash_ids": ids, **more}

    subagent = {"t": 12.0, "type": "subagent", "requests": [request(1.0, 64, [9])]}
    requests = [
        request(0.0, 130, [1, 2], think_time=0.0, api_time=4.0),
        request(10.0, 200, [1, 2, 3]),
        subagent,
        request(30.0, 260, [1, 2, 3, 4], think_time=2.5),
    ]
    return {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": requests, **changes}


def test_agentic_sessions_have_think_times_subagents_and_no_copies(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(agentic()))
    (tmp_path / "b.json").write_text(json.dumps(agentic(id="copy")))
    workload = read_workload("agentic", tmp_path)
    (session,) = workload.sessions()
    assert workload.notes == {"duplicate sessions dropped": 1}
    assert [turn.think for turn in session.turns] == [0.0, 6.0, 2.5], "unknown: the time between, without the server's"
    (child,) = session.turns[2].after
    assert (child.parent, child.turns[0].at, session.turns[2].number) == ("a", 13.0, 3)
    assert session.turns[0].prompt[0] == Blocks("agentic a", (1, 2), 64, 128)
    assert session.turns[0].known_tokens == 130, "tokens that no hash covers are in the prompt too"
    assert contents(workload).requests == 4


def test_text_formats_write_roles_out_and_continue(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello you"}, {"from": "human", "value": "Bye"}]
    array = tmp_path / "s.json"
    array.write_text(
        json.dumps(
            [{"id": "x", "conversations": [*said, {"from": "gpt", "value": "Bye"}]}, {"id": "y", "conversations": []}]
        )
    )
    workload = read_workload("sharegpt", array)
    (session,) = workload.sessions()
    assert [(turn.prompt, turn.continues, turn.output_tokens) for turn in session.turns] == [
        ((Text("User: Hi\nAssistant:"),), False, 2),
        ((Text("\nUser: Bye\nAssistant:"),), True, 1),
    ]
    assert workload.notes == {"conversations without an answer dropped": 1}
    turn = {
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "U"}]}]
    }
    trace = tmp_path / "sg.json"
    trace.write_text(
        json.dumps({"metadata": {"n": [1, 2]}, "conversations": [[turn, {"messages": turn["messages"][1:]}]]}, indent=1)
    )
    (session,) = sessions("sglang", trace)
    assert [turn.prompt for turn in session.turns] == [
        (Text("System: S\nUser: U\nAssistant:"),),
        (Text("\nUser: U\nAssistant:"),),
    ]


@pytest.mark.parametrize(
    ("name", "content", "line", "field"),
    [
        ("mooncake", '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n{"timestamp"\n', 2, ""),
        ("mooncake", '{"timestamp": 0, "input_length": "9", "output_length": 1, "hash_ids": [1]}', 1, "input_length"),
        ("mooncake", '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, "b"]}', 1, "hash_ids[1]"),
        ("mooncake", '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}', 1, "hash_ids"),
        ("bailian", '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}', 1, "parent_chat_id"),
        ("agentic", '{"id": "a", "requests": [{"t": 0, "in": -1}]}', 1, "requests[0].in"),
        ("sharegpt", '[{"conversations": []},\n {"conversations": [{"from": 3}]}]', 2, "conversations[0].from"),
        ("sharegpt", '[{"conversations": []},\n {"conv', 2, ""),
        ("sglang", '{"metadata": 1}', 1, "conversations"),
    ],
)
def test_malformed_traces_are_named(tmp_path: Path, name: str, content: str, line: int, field: str) -> None:
    path = tmp_path / "bad"
    path.write_text(content)
    with pytest.raises(MalformedTrace) as caught:
        sessions(name, path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, line, field), str(caught.value)


def test_unknown_formats_and_absent_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mooncake, agentic"):
        read_workload("csv", tmp_path)
    for name in FORMATS:
        with pytest.raises(ConfigError, match="exists"):
            read_workload(name, tmp_path / "nothing")


@real
def test_the_conversation_trace_has_the_prefix_hits_that_its_authors_tell() -> None:
    found = contents(read_workload("mooncake", TRACES / "mooncake_conversation.jsonl"))
    assert (found.requests, found.blocks, found.blocks_unique) == (12_031, 288_500, 182_790)
    assert round(found.block_hit_ratio, 3) == 0.366


@real
def test_real_agentic_sessions_are_read_without_their_copy() -> None:
    workload = read_workload("agentic", TRACES / "agentic")
    found = contents(workload)
    assert (found.sessions, found.requests) == (19, 388) and workload.notes == {"duplicate sessions dropped": 1}
    assert found.block_hit_ratio > 0.9


@real
@pytest.mark.slow
@pytest.mark.parametrize("requests", [12_031])
def test_rendered_tokens_hit_exactly_where_the_hashes_do(requests: int) -> None:
    workload = shape.limited(read_workload("mooncake", TRACES / "mooncake_conversation.jsonl"), requests=requests)
    vocabulary, seen, hits, total = Vocabulary(1000, 30000), set[str](), 0, 0
    by_hash, known, whole = 0, set[int](), 0
    for session in workload.sessions():
        (prompt,) = session.turns[0].prompt
        assert isinstance(prompt, Blocks)
        pages = page_hashes(vocabulary.ids((prompt,)).tolist(), 512)
        ids = prompt.ids[: len(pages)]
        hits += next((at for at, page in enumerate(pages) if page not in seen), len(pages))
        by_hash += next((at for at, number in enumerate(ids) if number not in known), len(ids))
        seen.update(pages)
        known.update(ids)
        total += len(pages)
        whole += len(ids)
    assert (hits, total) == (by_hash, whole) and round(hits / total, 3) == HITS
