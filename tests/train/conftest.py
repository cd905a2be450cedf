"""One tiny target with answers, and one head trained on them, for all tests here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stoop.train.job import Job
from stoop.train.stages import run_export, run_train
from support import training


@contextmanager
def one_thread() -> Iterator[None]:
    """For fixtures that serve many tests, which each test's own limit comes too late for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _one_thread_for_fixtures_of_modules() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_target(tmp_path_factory.mktemp("train") / "target")


@pytest.fixture(scope="session")
def answers(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers") / "data"
    with one_thread():
        training.write_answers(target, folder, num_drawn=160, num_greedy=24)
    return folder


@pytest.fixture(scope="session")
def trained(target: Path, answers: Path) -> Job:
    """Trained and exported in float64, in both layouts."""
    job = training.make_job(target, answers.parent)
    with one_thread():
        assert run_train(job)
        run_export(job, "both", "float64")
    return job
