"""What the demo asks, and that it complains when the answers are wrong; no servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.demo_conversation import Conversation, Phase, Turn, complaints

GOOD = Turn(prompt=1000, device=0, host=0, pool=960, ttft=0.1, output=(5, 6))


@pytest.mark.parametrize(("turns", "longest"), [(2, 1024), (3, 2048), (5, 6144), (7, 5000)])
def test_every_prompt_begins_with_the_one_before_and_its_answer(turns: int, longest: int) -> None:
    conversation = Conversation(turns, longest)
    answers = [[turn] * conversation.answer for turn in range(turns)]
    prompts = [conversation.prompt(turn, answers) for turn in range(turns)]
    for before, answer, prompt in zip(prompts, answers, prompts[1:], strict=False):
        assert prompt[: len(before) + len(answer)] == before + answer
        assert len(prompt) > len(before) + len(answer)
    assert len(prompts[-1]) == longest


def test_a_wrong_answer_and_a_page_that_did_not_come_back_are_complaints() -> None:
    reference = Phase("without_pool", "without the pool", (replace(GOOD, pool=0),) * 2)
    cold = Phase("cold", "cold", (replace(GOOD, pool=0), replace(GOOD, device=960, pool=0)))
    assert complaints(reference, [cold, Phase("flush", "after a flush", (GOOD, GOOD), from_pool=True)]) == []
    wrong = Phase("flush", "after a flush", (replace(GOOD, pool=0), replace(GOOD, output=(5, 7))), from_pool=True)
    missing, differs = complaints(reference, [wrong])
    assert "turn 1" in missing and "no token came from the pool" in missing
    assert "turn 2" in differs and "[5, 7]" in differs and "[5, 6]" in differs
