"""One tiny target with answers, and one head trained on them, for all tests here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stoop.train.job import Job
from stoop.train.stages import run_export, run_train
from train import small


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """For the fixtures of the package, which each test's own limit comes too late for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_target(tmp_path_factory.mktemp("train") / "target")


@pytest.fixture(scope="package")
def answers(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers") / "data"
    small.write_answers(target, folder, num_drawn=160, num_greedy=24)
    return folder


@pytest.fixture(scope="package")
def trained(target: Path, answers: Path) -> Job:
    """Trained and exported in float64, in both layouts."""
    job = small.make_job(target, answers.parent)
    assert run_train(job)
    run_export(job, "both", "float64")
    return job
