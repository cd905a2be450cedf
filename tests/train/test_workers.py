"""Several engines answer side by side: together they make what one makes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stoop.config.errors import ConfigError
from stoop.train.answers import Share
from stoop.train.prompts import Prompt
from stoop.train.settings import DataSettings, Settings
from stoop.train.shards import read_counts
from stoop.train.stages import Job, run_data
from train.test_data import documents, write_text_model


def say(line: str) -> None:  # workers find it by its name
    print(line, file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(20)))
    return path


def job(target: Path, out: Path, **data: Any) -> Job:
    settings = DataSettings(
        **{"max_answer": 12, "max_len": 400, "greedy_share": 0.0, "max_num_seqs": 4, **data}
    )
    return Job(str(target), out, Settings(data=settings, device="cpu"), say)


def test_two_workers_make_what_one_makes(target: Path, prompts: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_data(job(target, one), [prompts])
    run_data(job(target, two, workers=2, invent=3), [prompts])
    invented = [path / "invented.jsonl" for path in (two / "data", two / "data" / "part-1")]
    numbers = [
        json.loads(line)["attempt"] for path in invented for line in path.read_text().splitlines()
    ]
    assert len(numbers) >= 3 and len(set(numbers)) == len(numbers), "invented twice"
    given = documents(one / "data")
    found = documents(two / "data")
    assert len(given) == 20 and set(given) < set(found)
    assert read_counts(two / "data")["answers"] == len(found)
    # One alone goes on where both stopped, and finds nothing left of the given prompts.
    run_data(job(target, two), [prompts])
    assert documents(two / "data") == found


def test_shares_are_disjoint_and_whole() -> None:
    asked = [Prompt(key, [1]) for key in range(100)]
    for count in (1, 2, 3, 7):
        shares = [Share(worker, count) for worker in range(count)]
        assert all(sum(share.holds(prompt) for share in shares) == 1 for prompt in asked)
        assert sum(share.count(10) for share in shares) == 10


def test_workers_that_fail_are_named(
    target: Path, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="of 2, these failed: 0, 1"):
        run_data(job(target, tmp_path / "out", workers=2, kv_cache_memory="1000"), [prompts])
    assert "worker 1: the KV cache would hold" in capfd.readouterr().err
