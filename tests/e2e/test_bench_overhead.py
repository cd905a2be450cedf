"""`stoop bench overhead`: the same work on every side."""

import json
from pathlib import Path

import pytest

from stoop.bench import overhead as bench
from stoop.bench.overhead_report import print_overhead
from stoop.cli.bench.overhead import _as_args
from support.server import SMALL_ENGINE, write_served_model

OPTIONS = {"device": "cpu", "dtype": "float64", "kv_cache_memory": "16MiB", "max_num_seqs": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_served_model(tmp_path_factory.mktemp("overhead") / "model"))


@pytest.fixture(scope="module")
def work() -> bench.Work:
    prompts = [[number, 7, number % 5] for number in range(1, 9)]
    return bench.Work(prompts[3:], prompts[:3], output_len=6, clients=3)


def test_every_side_does_the_same_work(
    model: str, work: bench.Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each side counts its tokens, and fails if there are fewer."""
    engine = bench.Engine(model, OPTIONS, [*SMALL_ENGINE, "--max-num-seqs", "3"])
    stages: list[str] = []
    found = bench.measure_overhead(engine, work, lambda stage, done, total: stages.append(stage))
    assert stages == ["offline", "async", "server", "done"] and list(found) == stages[:3]
    assert all(side.tokens_per_s > 0 and side.ttft > 0 for side in found.values())
    print_overhead(found, {"model": "m", "clients": 3}, lambda line: None, tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == record
    shares = {side["side"]: side["share"] for side in record["sides"]}
    assert shares["offline"] == 1.0
    speeds = {name: side.tokens_per_s for name, side in found.items()}
    assert shares["server"] == pytest.approx(speeds["server"] / speeds["offline"], rel=1e-3)


def test_a_side_that_fails_is_named(model: str, work: bench.Work) -> None:
    options = {**OPTIONS, "max_model_len": 4}  # too short for a prompt and an answer
    with pytest.raises(bench.SideFailed, match=r"offline could not be measured: .*max_model_len"):
        bench.measure_overhead(bench.Engine(model, options, []), work, lambda *stage: None)


def test_options_become_flags_of_the_server() -> None:
    given = {"max_num_seqs": 3, "enable_prefix_caching": False, "sanitize": True, "dtype": "auto"}
    assert _as_args(given) == ["--max-num-seqs", "3", "--no-enable-prefix-caching", "--sanitize"]
