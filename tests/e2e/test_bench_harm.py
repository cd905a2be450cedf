"""`stoop bench harm`: the command, its exit codes and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from stoop.bench import harm_bugs
from support.drafters import write_random_head

QUESTIONS = Path(__file__).parents[1] / "data" / "questions.jsonl"
ONE = ("--only", "state (full")  # no drafts
SMALL = ("--device", "cpu", "--dtype", "float64", "--max-tokens", "8", "--num-questions", "4")
SMALL += ("--max-model-len", "256")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("heads") / "head"
    sizes = {"vocab_size": 260, "draft_vocab_size": 96}
    return json.dumps(
        {"method": "eagle3", "model": str(write_random_head(folder, "eagle3", sizes))}
    )


@pytest.fixture
def stoop(stoop: Callable) -> Callable:
    return partial(stoop, "bench", "harm")


def test_a_table_and_a_json_line(text_model: Path, head: str, stoop: Callable) -> None:
    args = (str(text_model), *SMALL, *ONE, "--questions", str(QUESTIONS), "-sc", head)
    code, shown, progress = stoop(*args)
    assert code == 0, progress
    record = json.loads(shown.splitlines()[-1])
    assert (record["bench"], record["ok"], record["num_questions"]) == ("harm", True, 4)
    (row,) = record["rows"]
    assert (row["report"], row["measure"], row["mode"]) == (42444, "answers change", "full")
    assert row["healthy"]["num_equal"] == 4 and row["broken"]["num_equal"] < 4
    assert "42444 shared warm-up and capture state (full, reference): answers change" in shown
    assert "1 of 3: eager" in progress and "3 of 3: shared warm-up" in progress


def test_a_bug_that_does_nothing_fails_the_command(
    text_model: Path, head: str, stoop: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (bug,) = harm_bugs.choose_bugs("cpu", ONE[1])
    idle = replace(bug, mutant=replace(bug.mutant, apply=lambda patch: None))
    monkeypatch.setattr(harm_bugs, "CPU_BUGS", (idle,))
    args = (str(text_model), *SMALL, "--questions", str(QUESTIONS), "-sc", head, "--markdown")
    code, shown, _ = stoop(*args, "--out", str(tmp_path / "out.json"))
    assert code == 1
    assert "| 42444 | shared warm-up and capture state (full, reference) | healthy |" in shown
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["ok"] is False
    assert record["rows"][0]["problems"] == ["the bug does not show as 'answers change'"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no questions were given"),
        (("--questions", str(QUESTIONS), "--modes", "half"), "--modes has 'half'"),
        (("--questions", str(QUESTIONS), "--limits", "9"), "--limits 9: use two rising numbers"),
        (("--questions", str(QUESTIONS), "--only", "no such"), "no bug is left"),
        (("--questions", str(QUESTIONS), "-sc", "none"), "needs an EAGLE head"),
    ],
)
def test_refusals(text_model: Path, stoop: Callable, args: tuple[str, ...], message: str) -> None:
    code, _, error = stoop(str(text_model), "--device", "cpu", *args)
    assert code == 2 and message in error


def test_help(stoop: Callable) -> None:
    code, shown, _ = stoop("--help")
    assert code == 0 and "--num-questions" in shown and "--markdown" in shown
