"""What is shown while a stage is under way: how far, how fast, how long."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stoop.cli import train_display
from stoop.cli.train_display import Display
from stoop.train import progress
from stoop.train.answers import Share, make_data, read_inventions
from stoop.train.progress import AnswerPace, Combined, Progress, StepPace, Teller, duration
from stoop.train.settings import DataSettings, Deadline
from stoop.train.stages import run_train
from support import training
from support.engines import make_llm
from support.training import write_text_model


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.now = 100.0
        for module in modules:
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def test_durations_are_as_long_as_one_can_take_in() -> None:
    seconds = (0.2, 45.4, 99, 100, 3599, 5999, 12000)
    assert [duration(each) for each in seconds] == [
        "0 s",
        "45 s",
        "99 s",
        "2 min",
        "60 min",
        "1 h 40 min",
        "3 h 20 min",
    ]


def test_figures() -> None:
    given = Progress("answering", 1200, 4000, "answers", 1250.4, 40)
    assert given.figures == "1,200 of 4,000 answers, 1,250 tokens/s, about 40 s left"
    assert Progress("loading weights", 30, 120).figures == "25%"
    assert Progress("starting", 0, None).figures == ""


def make_pace(total: int, longest: int, deadline: Deadline | None = None) -> Any:
    generated = [0]
    start = Progress("answering", 0, total, "answers")
    shown: list[Progress | None] = []
    pace = AnswerPace(
        start, longest, deadline or Deadline(None), shown.append, lambda: generated[0]
    )
    return pace, generated, shown


def test_a_batch_that_finishes_all_at_once_has_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, progress)
    pace, generated, shown = make_pace(total=10, longest=100)
    for _ in range(10):
        pace.ask()
    for _ in range(40):
        clock.now += 0.5
        generated[0] += 10
        pace.step()
    assert shown[-1] == Progress("answering", 0, 10, "answers", 20.0, 30.0)
    for _ in range(10):
        pace.add(40)
    assert pace.progress(20.0).done == 10


def test_the_estimate_follows_the_length_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 to come, 4 at a time, of 10 tokens where 1,000 are allowed; a step takes a second."""
    clock = Clock(monkeypatch, progress)
    pace, generated, _ = make_pace(total=200, longest=100)
    for _ in range(25):
        for _ in range(4):
            pace.ask()
        for _ in range(10):
            clock.now += 1
            generated[0] += 4
            pace.step()
        for _ in range(4):
            pace.add(10)
    left = pace.progress(250.0).seconds_left
    assert left is not None and 250 <= left <= 330


def test_requests_that_fail_are_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, progress)
    pace, generated, _ = make_pace(total=40, longest=10)
    pace.num_steps, generated[0] = 100, 400
    for number in range(40):
        pace.ask()
        pace.add(10, good=number % 2 == 0)
    found = pace.progress(100.0)
    assert found.done == 20 and 90 < (found.seconds_left or 0) < 110  # again as many


def test_no_estimate_passes_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, progress)
    deadline = Deadline(30)
    pace, generated, shown = make_pace(1000, 100, deadline)
    steps = StepPace(0, 1000, deadline, shown.append)
    for _ in range(10):
        clock.now += 1
        generated[0] += 1
        pace.step()
        steps.add(5)
    assert [each and each.seconds_left for each in shown[-2:]] == [20, 20]


def test_the_first_step_of_training_is_not_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, progress)
    shown: list[Any] = []
    pace = StepPace(10, 30, Deadline(None), shown.append)
    for seconds in (60, 2, 2, 2):
        clock.now += seconds
        pace.add(100)
    assert [each.done for each in shown] == [11, 12, 13, 14]
    assert [each.seconds_left for each in shown] == [60 * 19, 2 * 18, 2 * 17, 2 * 16]
    assert shown[-1].tokens_per_s == 50


def test_workers_are_shown_as_one() -> None:
    shown: list[Any] = []
    combined = Combined(shown.append)
    combined(0, Progress("inventing", 3, 10, "prompts", 100, 7))
    combined(1, Progress("inventing", 5, 10, "prompts", 150, 5))
    assert shown[-1] == Progress("inventing", 8, 20, "prompts", 250, 7)
    combined(1, Progress("answering", 1, 50, "answers", 80, 60))  # it is ahead
    assert shown[-1] == Progress("inventing", 8, 20, "prompts", 100, 7)
    combined(0, None)
    assert shown[-1] == Progress("answering", 1, 50, "answers", 80, 60)
    combined(0, Progress("answering", 2, 40, "answers", 20, 90))
    assert shown[-1] == Progress("answering", 3, 90, "answers", 100, 90)
    combined(0, None)
    combined(1, None)
    assert shown[-1] is None


# ---- stages ----


def test_the_data_stage_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOW_SECONDS", 0.0)
    folder = write_text_model(tmp_path / "model")
    llm = make_llm(folder, max_num_seqs=4, max_model_len=96)
    settings = DataSettings(invent=3, max_answer=12, max_len=96, temperature=1.5)
    lines: list[str] = []
    shown: list[Progress | None] = []
    asked = [[{"role": "user", "content": f"number {i}"}] for i in range(8)]
    share = Share(0, 1, read_inventions(tmp_path / "data"))
    teller = Teller(lines.append, shown.append)
    make_data(llm, tmp_path / "data", asked, settings, 0, Deadline(None), teller, share)
    assert shown[-1] is None and "data: inventing 3 prompts" in lines
    assert "data: 3 of 3 prompts invented" in lines, "no more, whatever the batch would hold"
    for stage, least in (("inventing prompts", 3), ("answering", 8)):
        found = [each for each in shown if each is not None and each.stage == stage]
        done = [each.done for each in found]
        assert done == sorted(done) and done[0] < done[-1]
        assert {each.total for each in found} == {found[0].total} and found[0].total >= least
        assert all(each.seconds_left is not None for each in found[progress.FIRST_STEPS :])
        assert all(each.tokens_per_s for each in found[1:])


def test_training_shows_every_step(
    target: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHOW_SECONDS", 0.0)
    (tmp_path / "data").symlink_to(answers)
    job = training.make_job(target, tmp_path, [], steps=4, log_every=50, eval_every=4)
    shown: list[Any] = []
    object.__setattr__(job, "show", shown.append)
    assert run_train(job)
    assert [each.done for each in shown if each and each.stage == "training"] == [1, 2, 3, 4]
    assert any(each and each.stage == "evaluating" for each in shown) and shown[-1] is None


# ---- the terminal ----


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch, train_display)
    with Display() as display:
        for second in range(3600):
            clock.now += 1
            if second == 25:
                display.say("a line of the log")
            display.show(Progress("answering", second, 3600, "answers", 10, 3600 - second))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "answering: 9 of 3,600 answers, 10 tokens/s, about 60 min left"
    assert lines[1].startswith("answering: 19 of")
    assert lines[2] == "a line of the log" and lines[3].startswith("answering: 35 of")
    assert 60 < len(lines) < 100, "a long run needs fewer of them"


def test_on_a_terminal_there_is_a_bar_below_the_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def terminal(**options: Any) -> Console:
        return Console(**options, force_terminal=True, width=100, color_system=None)

    monkeypatch.setattr(train_display, "Console", terminal)
    with Display() as display:
        display.show(Progress("inventing prompts", 2, 8, "prompts", 45, 12))
        display.say("data: [8] prompts :smile:")
        display.show(Progress("inventing prompts", 3, 8, "prompts", 45, 10))
        assert display.bars is not None
        display.bars.refresh()
        display.show(None)
        display.show(Progress("loading weights", 0, None))
    text = capsys.readouterr().err
    assert "inventing prompts" in text and "2 of 8 prompts, 45 tokens/s, about 12 s left" in text
    assert "data: [8] prompts :smile:\n" in text
    assert "3 of 8 prompts, 45 tokens/s, about 10 s left" in text
