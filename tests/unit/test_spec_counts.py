"""Accepted drafts and tokens per step, where steps make different numbers of drafts."""

from types import SimpleNamespace
from typing import Any

import pytest

from stoop.bench.step_drafts import StepDrafts, shown_shares
from stoop.cli.acceptance import print_acceptance
from stoop.core.messages import Delta, EngineRequest
from stoop.core.outputs import CompletionOutput, DecodeSteps, RequestOutput, SpecCounts
from stoop.core.sampling_params import SamplingParams
from stoop.engine.outputs import Answer


def varied() -> SpecCounts:
    """Half of the steps make 3 drafts, the others 1; all are right but some at position 3."""
    counts = SpecCounts(4)
    for step in range(100):
        wanted = 3 if step % 2 else 1
        counts.add(wanted, min(wanted, 2 if step % 4 == 1 else 3))
    return counts


def test_rates_are_shares_of_the_drafts_at_a_position() -> None:
    counts = varied()
    assert counts.num_draft_tokens_per_pos == [100, 50, 50, 0]
    assert counts.num_accepted_tokens_per_pos == [100, 50, 25, 0]
    assert counts.acceptance_rates == [1.0, 1.0, 0.5, 0.0]
    assert counts.mean_acceptance_length == 1 + 175 / 100
    assert sum(counts.num_draft_tokens_per_pos) == counts.num_draft_tokens
    assert counts.as_metrics()["spec_decode_num_draft_tokens_per_pos"] == [100, 50, 50, 0]


def test_copies_and_sums_keep_all_counts() -> None:
    counts = varied()
    copy = counts.copy()
    counts.add(4, 4)
    assert copy == varied() != counts
    answers = [SimpleNamespace(spec=varied()), SimpleNamespace(spec=None)]
    total = SpecCounts.sum([SimpleNamespace(outputs=answers)] * 2, 3)  # type: ignore[list-item]
    assert total.num_draft_tokens_per_pos == [200, 100, 100]
    assert total.acceptance_rates == [1.0, 1.0, 0.5]


def answered(num_tokens: int, num_steps: int, spec: SpecCounts | None) -> RequestOutput:
    answer = CompletionOutput(0, "", [0] * num_tokens, spec=spec, num_decode_steps=num_steps)
    return RequestOutput("r", None, [1], [answer], True)


def test_an_answer_counts_every_step_after_the_prompts() -> None:
    rules: Any = SimpleNamespace(params=SamplingParams())
    answer = Answer(0, EngineRequest("r", (1, 2), rules), None, num_drafts=4)
    answer.extend(Delta("r", []))  # a part of the prompt
    answer.extend(Delta("r", [5]))  # its end
    assert answer.output().num_decode_steps == 0
    for tokens, drafts in (([6], 0), ([7, 8, 9], 4), ([10], 2), ([11], 0)):
        answer.extend(Delta("r", tokens, num_drafts=drafts, num_accepted=len(tokens) - 1))
    before = answer.output()
    answer.extend(Delta("r", [], "error", num_drafts=4))  # it found no token
    assert (before.num_decode_steps, answer.output().num_decode_steps) == (4, 5)
    request = RequestOutput("r", None, [1, 2], [before, answer.output()], True)
    steps = DecodeSteps.of([request])
    assert steps == DecodeSteps(num_steps=9, num_tokens=12, num_with_drafts=5)
    assert steps.tokens_per_step == 12 / 9 and steps.share_with_drafts == 5 / 9


def test_tokens_per_step_of_several_runs() -> None:
    runs = [DecodeSteps.of([answered(97, 92, None)]), DecodeSteps(8, 4, 2)]
    assert DecodeSteps.sum(runs) == DecodeSteps(100, 100, 2)
    assert DecodeSteps.sum([]) == DecodeSteps() == DecodeSteps.of([answered(0, 0, None)])
    assert DecodeSteps().tokens_per_step is DecodeSteps().share_with_drafts is None


def test_the_table_tells_all_steps_from_those_with_drafts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half of 200 steps had drafts: 2.75 tokens each, the others 1. No rate without drafts."""
    print_acceptance([answered(1 + 275 + 100, 200, varied())], 4)
    (row,) = [line for line in capsys.readouterr().err.splitlines() if "2.75" in line]
    cells = [cell.strip() for cell in row.split("│")[2:-1]]
    assert cells == ["100%", "100%", "50%", "-", "1.88", "50%", "2.75"]
    print_acceptance([answered(41, 40, SpecCounts(4))], 4)
    assert capsys.readouterr().err == "no drafts were made in 40 steps\n"
    print_acceptance([answered(41, 40, None)], 0)
    assert capsys.readouterr().err == ""


def test_shares_of_steps_by_drafts() -> None:
    before = StepDrafts({0: 100, 3: 40}, 7)
    made = StepDrafts({0: 100, 3: 240, 1: 50}, 9).since(before)
    assert made == StepDrafts({3: 200, 1: 50}, 2)
    every = StepDrafts.sum([made, StepDrafts({0: 1, 1: 749})])
    assert every == StepDrafts({3: 200, 1: 799, 0: 1}, 2)
    assert list(every.shares.items()) == [(3, 0.2), (1, 0.799), (0, 0.001)]
    assert shown_shares(every.shares) == "3: 20%\n1: 80%\n0: <1%"
    assert shown_shares(StepDrafts({0: 10}).shares) == shown_shares({}) == "-"
    assert shown_shares({3: 0.0, 0: 1.0}) == "3: <1%\n0: 100%"
