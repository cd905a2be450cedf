"""Ctrl-C and SIGTERM at any moment: what is done is kept, and the next run ends as one that was
not interrupted."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import LLM
from stoop.engine.engine import Engine
from stoop.train import trainer, workers
from stoop.train.answers import read_inventions
from stoop.train.files import read_records
from stoop.train.interrupts import SIGNALS, held, interruptible
from stoop.train.job import Job
from stoop.train.settings import DataSettings, Settings
from stoop.train.shards import (
    INVENTED,
    ShardStore,
    all_folders,
    read_counts,
    read_manifest,
    read_shard,
)
from stoop.train.stages import run_train
from stoop.train.trainer import Trainer, load_checkpoint
from stoop.train.workers import run_data
from support import training
from support.engines import make_llm
from support.training import documents, log_of, same, stop_after, write_text_model


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def interrupting(
    patch: pytest.MonkeyPatch, place: Any, name: str, call: int, number: int = signal.SIGINT
) -> None:
    """Send the signal in this call of a function, before its work is done."""
    inner: Callable[..., Any] = getattr(place, name)
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            interrupt(number)
        return inner(*args, **options)

    patch.setattr(place, name, wrapped)


# ---- signals ----


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_for_the_end_of_what_must_be_whole(number: int) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    done = []
    with pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        with held():
            with held():
                interrupt(number)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        interrupt(number)
        done.append("never")
    assert done == ["inner", "outer"]
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_what_is_ignored_stays_ignored_and_other_threads_need_no_handlers() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = []

    def work() -> None:
        with interruptible(), held():
            done.append("in a thread")

    try:
        with interruptible():
            interrupt()
            done.append("on")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert done == ["on", "in a thread"]


# ---- training ----


@pytest.fixture
def job(target: Path, answers: Path, tmp_path: Path) -> Job:
    shutil.copytree(answers, tmp_path / "job" / "data")
    return training.make_job(target, tmp_path / "job", [], steps=6, log_every=1, eval_every=3)


@pytest.fixture(scope="module")
def whole(target: Path, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same, never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    shutil.copytree(answers, out / "data")
    job = training.make_job(target, out, [], steps=6, log_every=1, eval_every=3)
    assert run_train(job)
    return job


def checkpoint(job: Job) -> dict[str, Any]:
    return load_checkpoint(job.train / "checkpoint.pt")


def ended_alike(job: Job, whole: Job) -> bool:
    first, second = ([e for e in log_of(each) if e["split"] == "val"] for each in (job, whole))
    return same(checkpoint(job), checkpoint(whole)) and first == second and len(first) == 2


MOMENTS = [
    (trainer, "make_lesson", 3, 2),  # in the forward pass of step 3
    (trainer, "total_loss", 3, 2),  # between it and the backward pass
    (torch.nn.utils, "clip_grad_norm_", 3, 3),  # when the step is half taken: it is ended
    (Trainer, "_round", 1, 1),  # not yet in the head
    (Trainer, "_held_out", 1, 3),  # while it evaluates
    (Trainer, "_held_out", 2, 6),  # at the end
]
# One handler serves both signals: they take turns.
INTERRUPTED = [
    (*moment, number)
    for turn, moment in enumerate(MOMENTS)
    for place, number in enumerate(SIGNALS)
    if os.environ.get("STOOP_TEST_ALL") or turn % len(SIGNALS) == place
]


@pytest.mark.parametrize(("place", "name", "call", "step", "number"), INTERRUPTED)
def test_an_interrupted_run_ends_as_one_that_was_not(
    job: Job,
    whole: Job,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    call: int,
    step: int,
    number: int,
) -> None:
    with monkeypatch.context() as patch:
        interrupting(patch, place, name, call, number)
        with pytest.raises(KeyboardInterrupt) as stop:
            run_train(job)
    assert str(stop.value) == (
        f"training: saved at step {step} of 6; run the same command again to continue"
    )
    assert checkpoint(job)["step"] == step
    assert run_train(job)
    assert ended_alike(job, whole)


def test_an_interrupt_before_the_first_step_leaves_everything(
    job: Job, whole: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with --fresh, which would have replaced the checkpoint and its log."""
    shutil.copytree(whole.train, job.train)
    before = {path.name: path.read_bytes() for path in job.train.iterdir()}
    with monkeypatch.context() as patch:
        interrupting(patch, trainer, "make_lesson", 1)
        with pytest.raises(KeyboardInterrupt, match=r"before a step was done; .* again to"):
            run_train(replace(job, fresh=True))
    assert {path.name: path.read_bytes() for path in job.train.iterdir()} == before


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        ({"fresh": True}, "without --fresh to"),
        ({"fresh": True, "fresh_data": True}, "without --fresh-data to"),
    ],
)
def test_the_way_on_discards_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool], how: str
) -> None:
    interrupting(monkeypatch, trainer, "make_lesson", 2)
    with pytest.raises(
        KeyboardInterrupt, match=f"saved at step 1 of 6; run the same command {how}"
    ):
        run_train(replace(job, **flags))


def half_saved(patch: pytest.MonkeyPatch, calls: int) -> None:
    """Interrupt the first so many saves in the middle."""
    inner, done = torch.save, 0

    def save(state: Any, path: Path) -> None:
        nonlocal done
        done += 1
        inner(state, path)
        if done <= calls:
            os.truncate(path, path.stat().st_size // 2)
            interrupt()

    patch.setattr(torch, "save", save)


def test_an_interrupted_save_leaves_the_earlier_checkpoint(
    job: Job, whole: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert not run_train(job)
    before = (job.train / "checkpoint.pt").read_bytes()
    with monkeypatch.context() as patch:
        interrupting(patch, Trainer, "_update", 2)
        half_saved(patch, 1)
        with pytest.raises(KeyboardInterrupt) as stop:
            run_train(job)
    assert str(stop.value) == (
        "training: step 4 was not saved, the checkpoint is still that of step 2; "
        "run the same command again to continue"
    )
    assert (job.train / "checkpoint.pt").read_bytes() == before
    assert not list(job.train.glob("*.unfinished"))
    assert run_train(job)
    assert same(checkpoint(job), checkpoint(whole))


def test_a_first_save_that_is_interrupted_leaves_no_checkpoint(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, trainer, "make_lesson", 2)
    half_saved(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt, match="step 1 was not saved, nor was an earlier one"):
        run_train(job)
    assert not list(job.train.glob("checkpoint*"))


def test_an_interrupt_in_a_save_on_the_way_saves_again(
    job: Job, whole: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = replace(job.settings, train=replace(job.settings.train, save_every=0.0))
    with monkeypatch.context() as patch:
        half_saved(patch, 1)
        with pytest.raises(KeyboardInterrupt, match="saved at step 1 of 6"):
            run_train(replace(job, settings=often))
    assert checkpoint(job)["step"] == 1
    assert run_train(job)
    assert ended_alike(job, whole)


# ---- data ----


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="module")
def llm(text_model: Path) -> LLM:
    return make_llm(text_model, max_num_seqs=4, max_model_len=96)


@pytest.fixture
def data_job(text_model: Path, tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(workers, "LLM", lambda *args, **options: llm)
    data = DataSettings(max_answer=12, max_len=96, temperature=1.5, greedy_share=0.0, invent=3)
    lines: list[str] = []
    return Job(str(text_model), tmp_path / "out", Settings(data=data, device="cpu"), lines.append)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"number {i}\n" for i in range(20)))
    return path


@pytest.mark.parametrize(
    ("place", "name", "call"),
    [(ShardStore, "add", 5), (Engine, "step", 25), (Engine, "add_request", 12)],
)
def test_an_interrupt_keeps_the_answers_that_are_complete(
    data_job: Job,
    prompts: Path,
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    call: int,
) -> None:
    job = replace(data_job, settings=replace(data_job.settings, data=without_invention(data_job)))
    whole = replace(job, out=tmp_path / "whole")
    run_data(whole, [prompts])
    with monkeypatch.context() as patch:
        interrupting(patch, place, name, call)
        with pytest.raises(KeyboardInterrupt) as stop:
            run_data(job, [prompts])
    kept = read_counts(job.data)["answers"]
    assert 0 < kept < 20 and len(documents(job.data)) == kept
    assert str(stop.value) == (
        f"data: interrupted, keeping {kept} answers; run the same command again to continue"
    )
    if place is ShardStore:
        assert kept >= 5, "the answer that was being stored is lost"
    assert not llm.engine.has_work
    run_data(job, [prompts])
    assert documents(job.data) == documents(whole.data)


def without_invention(job: Job) -> DataSettings:
    return replace(job.settings.data, invent=0)


def test_an_interrupt_keeps_the_prompts_that_are_invented(
    data_job: Job, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    step = Engine.step

    def interrupt_after_two(engine: Engine) -> Any:
        outputs = step(engine)
        found.extend(1 for o in outputs if o.finished and o.outputs[0].finish_reason == "stop")
        if len(found) >= 2:
            interrupt()
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupt_after_two)
        with pytest.raises(KeyboardInterrupt, match="keeping 2 invented prompts; run"):
            run_data(data_job, [])
    texts = (data_job.data / INVENTED).read_text()
    with (data_job.data / INVENTED).open("a") as file:
        file.write('{"attempt": 99, "pro')  # as a run that was killed leaves it
    assert len(read_inventions(data_job.data).texts) == 2
    run_data(data_job, [])
    lines = (data_job.data / INVENTED).read_text()
    assert lines.startswith(texts) and len(read_records(data_job.data / INVENTED)) == 3


def test_an_interrupt_before_the_first_answer_says_so(
    data_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, Engine, "step", 1)
    with pytest.raises(KeyboardInterrupt, match="before the first answer was done; run the same"):
        run_data(data_job, [])


# ---- the command, as a user runs it ----


SOON = """
from stoop.cli import main, train_display
train_display.QUIET_LEAST = 0.3
main.main()
"""


def start(target: Path, out: Path, prompts: Path, *flags: str) -> subprocess.Popen[str]:
    args = ["train-draft", target, "--out", out, "--prompts", prompts, "--device", "cpu"]
    tiny = ["--max-len", "64", "--max-answer", "12", "--temperature", "1.5", "--greedy-share", "0"]
    command = [sys.executable, "-c", SOON, *map(str, args), *tiny, *flags]
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


def interrupted_at(process: subprocess.Popen[str], *patterns: str) -> list[str]:
    """Lines of standard error; when all patterns have come, the whole group gets a SIGINT, as from
    a terminal."""
    assert process.stderr is not None
    lines, awaited = [], set(patterns)
    try:
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if awaited:
                awaited = {each for each in awaited if not re.search(each, line)}
                if not awaited:
                    os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, lines
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert not any("Traceback" in line for line in lines), lines
    return lines


def test_the_command_saves_on_ctrl_c(text_model: Path, prompts: Path, tmp_path: Path) -> None:
    flags = ("--steps", "100000", "--ttt-steps", "2", "--draft-vocab", "64", "--log-every", "1")
    process = start(text_model, tmp_path / "out", prompts, *flags)
    lines = interrupted_at(process, r"^step 3/")
    found = re.fullmatch(r"training: saved at step (\d+) of 100,000; run the same .*", lines[-1])
    assert found is not None and int(found[1]) >= 3, lines
    state = load_checkpoint(tmp_path / "out" / "train" / "checkpoint.pt")
    assert state["step"] == int(found[1])


def test_workers_keep_their_answers_on_ctrl_c(
    text_model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = ("--workers", "2", "--answers", "400", "--max-num-seqs", "4", "--stage", "data")
    process = start(text_model, out, prompts, *flags)
    lines = interrupted_at(
        process, r"^answering: [1-9]", r"^\[0\] .* to generate", r"^\[1\] .* to generate"
    )
    found = re.fullmatch(r"data: interrupted, keeping ([\d,]+) answers; run .*", lines[-1])
    assert found is not None, lines
    # A worker that was interrupted before its first answer has none.
    kept = [read_manifest(folder).get("answers", 0) for folder in all_folders(out / "data")]
    assert len(kept) == 2 and sum(kept) == int(found[1].replace(",", "")) > 0
    shards = [*(out / "data").rglob("shard-*.npz")]
    assert sum(len(read_shard(path)["keys"]) for path in shards) == sum(kept)
