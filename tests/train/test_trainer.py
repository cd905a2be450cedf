"""Runs that stop and go on, and what is refused."""

import json
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from stoop.cli.main import app
from stoop.config.errors import ConfigError
from stoop.train.job import Job
from stoop.train.settings import TrainSettings
from stoop.train.shards import read_shard
from stoop.train.stages import run_export, run_train
from stoop.train.trainer import Trainer, learning_rate, load_checkpoint
from stoop.train.workers import run_data
from support import training
from support.engines import make_llm
from support.training import log_of, same, stop_after, write_text_model


@pytest.fixture
def job(target: Path, answers: Path, tmp_path: Path) -> Job:
    shutil.copytree(answers, tmp_path / "data")
    return training.make_job(target, tmp_path, [], steps=6, log_every=2, eval_every=3)


def changed(job: Job, out: Path | None = None, **changes: Any) -> Job:
    given = {"steps": 6, "log_every": 2, "eval_every": 3, **changes}
    return training.make_job(Path(job.target), out or job.out, [], **given)


def checkpoint(job: Job) -> dict[str, Any]:
    return load_checkpoint(job.train / "checkpoint.pt")


def test_a_stopped_run_ends_as_one_that_was_not(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = changed(job, tmp_path / "whole")
    shutil.copytree(job.data, whole.data)
    assert run_train(whole)
    for steps in (2, 1, 99):
        with monkeypatch.context() as patch:
            stop_after(patch, steps)
            finished = run_train(job)
    assert finished
    assert same(checkpoint(job), checkpoint(whole))
    assert [e for e in log_of(job) if e["split"] == "val"][-1] == log_of(whole)[-1]


def test_the_time_budget_stops_cleanly(job: Job) -> None:
    hasty = Job(job.target, job.out, training.make_settings(), job.say)
    object.__setattr__(hasty.settings, "time_budget", 0.0)
    assert not run_train(hasty)
    assert checkpoint(job)["step"] == 0
    assert run_export(hasty, "eagle", "bfloat16")  # an untrained head, but a head


def test_a_budget_that_is_too_short_is_told_early(job: Job) -> None:
    lines: list[str] = []
    long = replace(
        job, settings=training.make_settings(steps=20_000, log_every=2), say=lines.append
    )
    object.__setattr__(long.settings, "time_budget", 1.5)
    assert not run_train(long)
    (told,) = [line for line in lines if "fit into --time-budget" in line]
    assert "of 20,000 steps" in told and "give --steps" in told
    assert lines.index(told) < 5, "it came late"
    lines.clear()
    run_train(replace(job, settings=training.make_settings(), say=lines.append, fresh=True))
    assert not any("--time-budget" in line for line in lines)


def test_the_log_forgets_what_will_come_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        run_train(job)
        patch.setattr(Trainer, "save", lambda self: None)  # the next steps are lost
        stop_after(patch, 2)
        run_train(job)
    run_train(job)
    steps = [entry["step"] for entry in log_of(job) if entry["split"] == "train"]
    assert steps == [2, 4, 6]


@pytest.mark.parametrize("change", [{"lr": 1e-4}, {"ttt_steps": 2}, {"batch_tokens": 99}])
def test_a_checkpoint_of_another_run_is_refused(job: Job, change: dict[str, Any]) -> None:
    run_train(job)
    other = changed(job, **change)
    flag = next(iter(change)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"was trained with --{flag}.*give.*--fresh"):
        run_train(other)
    assert run_train(replace(other, fresh=True))


def other_data(job: Job) -> Job:
    """As many documents and tokens as before, and the same vocabulary."""
    path = next(job.data.glob("shard-*.npz"))
    shard = read_shard(path)
    first = slice(0, int(shard["lengths"][0]))
    shard["tokens"][first] = shard["tokens"][first][::-1]
    with path.open("wb") as file:
        np.savez(file, **shard)
    return job


def in_float32(job: Job) -> Job:
    return replace(job, settings=replace(job.settings, dtype="float32"))


def other_weights(job: Job) -> Job:
    folder = job.out / "other"
    shutil.copytree(job.target, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return replace(job, target=str(folder))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_data, "trained on data that has changed since.*--fresh"),
        (in_float32, "with --dtype float64, not with --dtype float32.*--fresh"),
        (other_weights, "for a different target.*--fresh"),
    ],
)
def test_a_checkpoint_of_other_things_is_refused(
    job: Job, change: Callable[[Job], Job], sentence: str
) -> None:
    run_train(changed(job, steps=2))
    other = change(job)
    with pytest.raises(ConfigError, match=sentence):
        run_train(other)
    if change is other_weights:
        with pytest.raises(ConfigError, match=sentence):
            run_export(other, "eagle", "bfloat16")


def test_a_run_may_be_made_longer_and_says_so(job: Job) -> None:
    run_train(job)
    lines: list[str] = []
    assert run_train(replace(changed(job, steps=8), say=lines.append))
    assert checkpoint(job)["step"] == 8
    (line,) = [line for line in lines if "learning rate" in line]
    assert line.startswith(
        "training: 8 steps now, 6 when the checkpoint was saved; from step 6 the"
    )


def test_a_run_is_not_made_shorter_than_it_is(job: Job) -> None:
    run_train(job)
    with pytest.raises(ConfigError, match=r"--steps 3: that is 3 steps, .* is at step 6 already"):
        run_train(changed(job, steps=3))


def test_a_checkpoint_of_an_earlier_version_continues(job: Job) -> None:
    run_train(changed(job, steps=2))
    state = checkpoint(job)
    for name in ("target", "data", "dtype"):
        del state["identity"][name]
    del state["num_steps"]
    torch.save(state, job.train / "checkpoint.pt")
    assert run_train(job)
    assert run_export(job, "eagle", "bfloat16")


def test_the_learning_rate_rises_and_falls() -> None:
    settings = TrainSettings(lr=1.0, warmup=0.1)
    rates = [learning_rate(step, 100, settings) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[100] == pytest.approx(0.0)


def test_gradients_are_clipped_and_half_precision_has_masters(job: Job) -> None:
    half = changed(job, steps=2)
    object.__setattr__(half.settings, "dtype", "bfloat16")
    assert run_train(half)
    masters = checkpoint(half)["masters"]
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert any(not torch.equal(v, v.bfloat16().float()) for v in masters.values())


def test_stages_ask_for_those_before_them(target: Path, tmp_path: Path) -> None:
    job = training.make_job(target, tmp_path)
    with pytest.raises(ConfigError, match="run --stage data first"):
        run_train(job)
    with pytest.raises(ConfigError, match="run --stage train first"):
        run_export(job, "eagle", "bfloat16")
    with pytest.raises(ConfigError, match="--prompts FILE"):
        run_data(job, [])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--stage", "no"], "--stage no: use all"),
        (["--layout", "no"], "--layout no: use eagle"),
        (["--greedy-share", "2"], "--greedy-share 2.0: use at most 1"),
        (["--ttt-steps", "0"], "--ttt-steps 0: use at least 1"),
        (["--dtype", "float16", "--stage", "train"], "float16"),
    ],
)
def test_refusals_of_the_command(
    target: Path, tmp_path: Path, flags: list[str], sentence: str
) -> None:
    done = CliRunner().invoke(app, ["train-draft", str(target), "--out", str(tmp_path), *flags])
    assert isinstance(done.exception, ConfigError) and sentence in str(done.exception)


def test_help_explains_every_setting() -> None:
    done = CliRunner().invoke(app, ["train-draft", "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for flag in (
        "--prompts",
        "--invent",
        "--ttt-steps",
        "--draft-vocab",
        "--time-budget",
        "--no-fc-norm",
    ):
        assert flag in done.output


def test_the_command_from_prompts_to_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write_text_model(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "prompts.txt").write_text("\n".join(f"number {i}" for i in range(12)))
    flags = {
        "--out": str(out),
        "--prompts": str(tmp_path / "prompts.txt"),
        "--max-len": "64",
        "--max-answer": "16",
        "--temperature": "1.5",
        "--greedy-share": "0",
        "--steps": "2",
        "--ttt-steps": "2",
        "--draft-vocab": "64",
        "--device": "cpu",
    }
    args = [part for pair in flags.items() for part in pair]
    commands = [
        ["train-draft", str(folder), *args, "--stage", s] for s in ("data", "train", "export")
    ]
    output = ""
    for command in (*commands, commands[-1]):
        monkeypatch.setattr("sys.argv", ["stoop", *command])
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.exception
        output += done.output
    card = (out / "head" / "README.md").read_text()
    made = [shlex.join(["stoop", *command]) for command in commands]
    assert made[0] in card and made[1] in card and made[2] not in card
    assert (out / "head" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert re.search(r"64 of 258 tokens cover \d+\.\d+% of the answers", output)
    config = json.loads((out / "head" / "config.json").read_text())
    assert config["draft_vocab_size"] == 64 and config["torch_dtype"] == "bfloat16"
    drafter = {"model": str(out / "head"), "num_speculative_tokens": 2}
    llm = make_llm(folder, max_num_seqs=16, speculative_config=drafter)
    assert llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].spec is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_has_gradients_in_whatever_mode_the_caller_is(
    target: Path, answers: Path, tmp_path: Path, mode: Callable[[], AbstractContextManager]
) -> None:
    (tmp_path / "data").symlink_to(answers)
    job = training.make_job(target, tmp_path)
    brief = replace(job.settings, train=replace(job.settings.train, steps=2))
    with mode():
        assert run_train(replace(job, settings=brief))
