"""Several engines answer side by side: together they make what one makes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoop.config.errors import ConfigError
from stoop.train.answers import INVENTED, Inventions, Share
from stoop.train.prompts import Prompt
from stoop.train.shards import ShardStore, load_corpus, read_counts
from stoop.train.workers import run_data
from support.training import documents, make_data_job, write_text_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(20)))
    return path


def test_two_workers_make_what_one_makes(target: Path, prompts: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_data(make_data_job(target, one), [prompts])
    run_data(make_data_job(target, two, workers=2, invent=3), [prompts])
    invented = [path / "invented.jsonl" for path in (two / "data", two / "data" / "part-1")]
    numbers = [
        json.loads(line)["attempt"] for path in invented for line in path.read_text().splitlines()
    ]
    assert len(numbers) >= 3 and len(set(numbers)) == len(numbers), "invented twice"
    given = documents(one / "data")
    found = documents(two / "data")
    assert len(given) == 20 and set(given) < set(found)
    assert read_counts(two / "data")["answers"] == len(found)
    # One alone goes on where both stopped, and finds nothing left to do.
    run_data(make_data_job(target, two, invent=3), [prompts])
    assert documents(two / "data") == found


def test_shares_are_disjoint_and_whole() -> None:
    asked = [Prompt(key, [1]) for key in range(100)]
    for count in (1, 2, 3, 7):
        shares = [Share(worker, count, Inventions()) for worker in range(count)]
        assert all(sum(share.holds(prompt) for share in shares) == 1 for prompt in asked)
        assert sum(share.count(10) for share in shares) == 10


def test_workers_that_fail_are_named(
    target: Path, prompts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="0 with status 2, 1 with status 2"):
        run_data(
            make_data_job(target, tmp_path / "out", workers=2, kv_cache_memory="1000"), [prompts]
        )
    assert "[1] error: the KV cache would hold" in capfd.readouterr().err


def test_what_was_invented_is_neither_lost_nor_invented_again(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    """One worker, then two, then one."""
    data = tmp_path / "data"
    for workers, wanted in ((1, 3), (2, 7), (1, 7), (1, 9)):
        run_data(make_data_job(target, tmp_path, workers=workers, invent=wanted), [prompts])
        paths = [path for path in (data / INVENTED, data / "part-1" / INVENTED) if path.exists()]
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        attempts = [line["attempt"] for line in lines]
        assert wanted <= len(attempts) < wanted + 4 and len(set(attempts)) == len(attempts)
    found = documents(data)
    assert len(found) == len(set(found)) == read_counts(data)["answers"]


def test_answers_of_another_target_are_refused_before_anybody_works(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    store = ShardStore(tmp_path / "data", {"target": "other", "seed": 0}, worker=1)
    store.add([1, 2], [3, 4], (7, 0), greedy=True)
    store.flush(1.0)
    for workers in (1, 2):
        with pytest.raises(ConfigError, match="holds answers of target 'other'"):
            run_data(make_data_job(target, tmp_path, workers=workers), [prompts])
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_documents_that_are_alike_count_once(tmp_path: Path) -> None:
    for worker in range(3):
        store = ShardStore(tmp_path, {"seed": 0}, worker)
        store.add([1, 2], [3, 4], (7, 0), greedy=True)
        store.add([1, 2], [3, 5 + worker], (7, 1), greedy=False)
        store.flush(1.0)
    corpus = load_corpus(tmp_path)
    assert documents(tmp_path) == [(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 6), (1, 2, 3, 7)]
    assert corpus.greedy.tolist() == [True, False, False, False]
    assert corpus.prompt_lens.tolist() == [2] * 4 and corpus.keys.tolist() == [7] * 4


SLOW = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from support.training import make_data_job
from stoop.train.workers import run_data

if __name__ == "__main__":
    job = make_data_job(Path({target!r}), Path({out!r}), workers=2, answers=4000)
    run_data(job, [Path({prompts!r})])
"""


def test_workers_end_with_their_parent(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Killed, it cannot tell them."""
    out = tmp_path / "out"
    script = tmp_path / "slow.py"
    values = {"path": sys.path, "target": str(target), "out": str(out), "prompts": str(prompts)}
    script.write_text(SLOW.format(**values))
    parent = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    workers: list[int] = []
    try:
        _wait_for((out / "data" / "part-1").exists)  # they are at work
        workers = _children(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    assert len(workers) >= 2
    _wait_for(lambda: not any(_alive(pid) for pid in workers))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in path.read_text().split()] if path.exists() else []


def _wait_for(found: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)
