"""The harm table: healthy engines answer as eager ones, and every bug does the harm it declares."""

import json
import os
from dataclasses import replace
from decimal import Decimal
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoop.bench import apart
from stoop.bench.harm import Setting, measure_harm
from stoop.bench.harm_bugs import (
    CPU_BUGS,
    CUDA_BUGS,
    EVERY_BUG,
    FLASHINFER_BUGS,
    REPORTS,
    Bug,
    Measure,
    Workload,
    choose_bugs,
)
from stoop.bench.harm_report import HEADER, markdown_table, print_harm
from stoop.bench.harm_rows import HarmRow, Outcome
from stoop.bench.questions import Task
from stoop.check.mutants.base import applied
from stoop.checkpoint import toy
from stoop.config.errors import ConfigError
from support import fake_flashinfer
from support.checkpoints import CheckpointStore

LENGTHS = (9, 30, 14, 26, 11, 20)
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "block_size": 8,
    "capture_sizes": "1,4,6,48",
}


def quiet(stage: str, done: int, total: int | None) -> None:
    pass


def make_tasks() -> tuple[Task, ...]:
    return tuple(
        Task(tuple((7 * n + 3 * place) % 60 for place in range(length)), (5, 9, n), Decimal(n))
        for n, length in enumerate(LENGTHS)
    )


def write_attending_head(folder: Path) -> Path:
    """An EAGLE-1 head that is right as long as a token attends to its own key.

    Its residual stream has the vector of another token; attention adds that of the right one.
    """
    toy.write_head(folder, "eagle")
    weights = load_file(folder / "model.safetensors")
    other = torch.eye(toy.SIZE).roll(1, dims=0)  # maps the vector of t to that of t + 1
    attention = "layers.0.self_attn"
    weights["fc.weight"] = torch.cat((other, torch.zeros(toy.SIZE, toy.SIZE)), dim=1)
    weights[f"{attention}.q_proj.weight"] = 8 * torch.eye(toy.SIZE)
    weights[f"{attention}.k_proj.weight"] = 8 * torch.eye(toy.SIZE)
    weights[f"{attention}.v_proj.weight"] = torch.eye(toy.SIZE)
    weights[f"{attention}.o_proj.weight"] = 3 * other.T.contiguous()
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A toy whose answers do not depend on attention, with a head whose drafts do."""
    root = tmp_path_factory.mktemp("harm")
    target = toy.write_target(root / "toy", max_position=1 << 17)
    head = write_attending_head(root / "head")
    drafter = {"method": "eagle", "model": str(head)}
    limits = (64, 1 << 17)
    return Setting(str(target), ENGINE, drafter, 3, make_tasks(), 24, str(target), limits)


@pytest.fixture(scope="module")
def answering(checkpoints: CheckpointStore, drafting: Setting) -> Setting:
    """A random model, whose answers depend on attention."""
    return replace(drafting, model=str(checkpoints.get("llama3", dtype="float64")))


@pytest.fixture(scope="module")
def rows(drafting: Setting, answering: Setting) -> list[HarmRow]:
    drafts = [bug for bug in CPU_BUGS if bug.measure is not Measure.ANSWERS]
    answers = [bug for bug in CPU_BUGS if bug.measure is Measure.ANSWERS]
    found = measure_harm(drafting, drafts, quiet) + measure_harm(answering, answers, quiet)
    return sorted(found, key=lambda row: CPU_BUGS.index(row.bug))


def test_every_bug_does_the_harm_that_it_declares(rows: list[HarmRow]) -> None:
    assert {row.bug.report for row in rows} == set(REPORTS)
    assert [problem for row in rows for problem in row.problems()] == []


def test_healthy_engines_answer_as_the_eager_one(rows: list[HarmRow]) -> None:
    scored = [row.healthy for row in rows if row.bug.workload is not Workload.LIMITS]
    assert len(scored) == len(CPU_BUGS) - 1
    assert all(each.same and each.num_equal == each.num_answers for each in scored)


def find(rows: list[HarmRow], report: int, measure: Measure) -> list[HarmRow]:
    return [row for row in rows if (row.bug.report, row.bug.measure) == (report, measure)]


def test_stale_drafts_cost_acceptance_and_no_answers(rows: list[HarmRow]) -> None:
    """The first draft comes from draft prefill, and is as good as ever."""
    for row in find(rows, 38311, Measure.DRAFTS):
        healthy, broken = row.healthy, row.broken
        assert broken.num_equal == broken.num_answers == len(LENGTHS)
        assert broken.acceptance[0] > 0.6 * healthy.acceptance[0]
        assert broken.acceptance[2] < healthy.acceptance[2]


def test_what_the_others_cost(rows: list[HarmRow]) -> None:
    (built,) = find(rows, 40410, Measure.BUILDS)
    assert (built.healthy.figures["builds a step"], built.broken.figures["builds a step"]) == (
        1,
        2,
    )
    assert built.broken.acceptance == built.healthy.acceptance
    (refused,) = find(rows, 40410, Measure.REFUSED)
    assert (refused.broken.error or "").startswith("CaptureError: draft prefill of")
    (unpadded,) = find(rows, 39773, Measure.ERROR)
    assert (unpadded.broken.error or "").startswith("IndexError: index")
    (pieces,) = find(rows, 39773, Measure.STALE)
    assert pieces.broken.stale == "draft page_indptr"
    for row in find(rows, 42444, Measure.ANSWERS):
        assert row.broken.num_equal == 0 and row.broken.first_position == 0
        assert row.broken.loglikelihood != pytest.approx(row.healthy.loglikelihood, abs=0.01)
    (slow,) = find(rows, 43991, Measure.TIME)
    assert (
        slow.broken.figures["ms a step at 131,072"] > slow.healthy.figures["ms a step at 131,072"]
    )


def test_the_report(
    rows: list[HarmRow], drafting: Setting, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    print_harm(rows, drafting, "questions.jsonl", out=tmp_path / "out.json")
    *shown, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert json.loads((tmp_path / "out.json").read_text()) == record
    assert record["bench"] == "harm" and record["ok"] is True
    assert [row["report"] for row in record["rows"]] == [row.bug.report for row in rows]
    assert all(set(row) >= {"healthy", "broken", "measure", "problems"} for row in record["rows"])
    assert any("42444" in line for line in shown)
    lines = markdown_table(rows).splitlines()
    assert len(lines) == 2 + 2 * len(rows)
    assert {line.count(" | ") for line in lines if "---" not in line} == {len(HEADER) - 1}


# ---- what fails ----


def without_effect(bug: Bug) -> Bug:
    return replace(bug, mutant=replace(bug.mutant, apply=lambda patch: None))


def test_bugs_that_do_nothing_are_problems(drafting: Setting) -> None:
    bugs = [
        without_effect(bug)
        for bug in CPU_BUGS
        if bug.workload in (Workload.QUESTIONS, Workload.FEW)
        and (bug.mutant.mode == "full" and bug.drafts and bug.most_drafts is None)
    ]
    found = measure_harm(drafting, bugs, quiet)
    assert {bug.measure for bug in bugs} == {
        *(Measure.REFUSED, Measure.DRAFTS, Measure.ERROR, Measure.STALE),
    }
    for row in found:
        (problem,) = row.problems()
        assert problem == f"the bug does not show as {row.bug.measure.value!r}"


def test_a_sick_engine_is_a_problem(answering: Setting) -> None:
    (bug,) = choose_bugs("cpu", "state (full")
    with applied(bug.mutant):
        (row,) = measure_harm(answering, [bug], quiet)
    assert row.problems() == [
        f"the healthy engine differs from eager: 0 of {len(LENGTHS)} answers are equal",
        "the bug does not show as 'answers change'",
    ]


def test_a_mutant_that_no_longer_fits_the_code_is_a_problem() -> None:
    bug = replace(CPU_BUGS[0], measure=Measure.ERROR)
    row = HarmRow(bug, GOOD, Outcome(error="AttributeError: gone"), True, "float32")
    assert row.problems() == ["the mutant no longer fits the code: AttributeError: gone"]


def test_a_log_likelihood_that_is_no_number_is_a_sickness() -> None:
    sick = replace(GOOD, loglikelihood=float("nan"))
    bug = replace(CPU_BUGS[0], measure=Measure.ANSWERS)
    row = HarmRow(bug, sick, replace(GOOD, num_equal=0), False, "bfloat16")
    assert row.problems() == ["the healthy engine's log-likelihood is nan"]


GOOD = Outcome(num_answers=2, num_equal=2, same=True, tokens_per_step=3.0)
SHORT, LONG = "ms a step at 64", "ms a step at 128"


def timed(short: float, long: float) -> Outcome:
    return Outcome(figures={SHORT: short, LONG: long})


@pytest.mark.parametrize(
    ("measure", "healthy", "broken", "harmed"),
    [
        (Measure.ANSWERS, GOOD, replace(GOOD, num_equal=1), True),
        (Measure.ANSWERS, GOOD, GOOD, False),
        (Measure.ANSWERS, GOOD, Outcome(error="RuntimeError: shapes"), True),
        (Measure.ANSWERS, replace(GOOD, num_equal=1, same=None), replace(GOOD, num_equal=1), False),
        (Measure.DRAFTS, GOOD, replace(GOOD, tokens_per_step=2.5), True),
        (Measure.DRAFTS, GOOD, replace(GOOD, tokens_per_step=2.9), False),
        (Measure.DRAFTS, GOOD, replace(GOOD, tokens_per_step=1.0, num_equal=1), False),
        (Measure.DRAFTS, GOOD, Outcome(error="RuntimeError: shapes"), False),
        (Measure.TIME, timed(10, 11), timed(10, 40), True),
        (Measure.TIME, timed(10, 30), timed(10, 40), False),
        (Measure.TIME, GOOD, Outcome(error="MemoryError: no"), False),
        (Measure.NONE, timed(10, 11), timed(10, 12), True),
        (Measure.NONE, timed(10, 11), timed(10, 40), False),
        (Measure.NONE, timed(10, 11), Outcome(error="RuntimeError: shapes"), False),
    ],
)
def test_what_counts_as_harm(
    measure: Measure, healthy: Outcome, broken: Outcome, harmed: bool
) -> None:
    row = HarmRow(replace(CPU_BUGS[0], measure=measure), healthy, broken, True, "float32")
    assert row.problems() == ([] if harmed else [f"the bug does not show as {measure.value!r}"])


@pytest.mark.parametrize(("gap", "sick"), [(None, False), (0.1, False), (3.0, True)])
def test_rounding_is_no_sickness_where_sums_depend_on_the_batch(
    gap: float | None, sick: bool
) -> None:
    healthy = replace(GOOD, num_equal=1, same=False, largest_gap=gap)
    broken = replace(GOOD, tokens_per_step=1.0)
    bug = replace(CPU_BUGS[0], measure=Measure.DRAFTS)
    row = HarmRow(bug, healthy, broken, exact=False, dtype="bfloat16")
    assert len(row.problems()) == sick
    assert HarmRow(bug, healthy, broken, exact=True, dtype="float32").problems() != []


# ---- choosing, and processes ----


def test_bugs_are_chosen_by_device_mode_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_bugs("cpu") == list(CPU_BUGS)
    assert {bug.mutant.mode for bug in choose_bugs("cpu", modes=["step"])} == {"step"}
    assert {bug.report for bug in choose_bugs("cpu", "39773")} == {39773}
    with pytest.raises(ConfigError, match="no bug is left: use other --modes"):
        choose_bugs("cpu", "no such bug")
    library: list[object | None] = [None]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: library[0])
    assert set(choose_bugs("cuda")) == set(CUDA_BUGS)
    library[0] = object()
    assert set(choose_bugs("cuda:0")) == {*CUDA_BUGS, *FLASHINFER_BUGS}
    assert {bug.report for bug in choose_bugs("cuda:0")} == set(REPORTS)


def test_each_bug_has_a_number_of_its_own() -> None:
    """By which it is sent to another process."""
    assert [EVERY_BUG.index(bug) for bug in EVERY_BUG] == list(range(len(EVERY_BUG)))


def test_a_process_that_dies_is_a_result() -> None:
    assert apart.run_apart(os._exit, 3) == "the process ended with code 3"


def test_an_error_is_sent_as_text() -> None:
    ours, theirs = Pipe(duplex=False)
    apart._send(theirs, int, ("x",))
    assert ours.recv().startswith("ValueError: invalid literal")


@pytest.mark.parametrize("bug", FLASHINFER_BUGS, ids=lambda bug: bug.label)
def test_bugs_of_flashinfer(bug: Bug, drafting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the stand-in for the library."""
    fake_flashinfer.install(monkeypatch)
    (row,) = measure_harm(drafting, [bug], quiet)
    assert row.problems() == [], row.broken
