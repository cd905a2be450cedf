"""A server under mixed load is afterwards where it began. `tools/soak.py` is the long version."""

import asyncio
import os

import pytest

from support.server import ServerProcess, write_served_model
from support.soak import BUSY, Soak, Vitals, changes

USUAL = "60" if os.environ.get("STOOP_TEST_ALL") else "24"
SECONDS = float(os.environ.get("STOOP_SOAK_SECONDS", USUAL))
SEED = int(os.environ.get("STOOP_SOAK_SEED", "20"))
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
# So small that requests are preempted and the queue is full now and then.
ENGINE = (
    *("--device", "cpu", "--dtype", "float64", "--kv-cache-memory", "640KiB", "-sc", NGRAM),
    *("--max-num-seqs", "6", "--max-model-len", "512"),
)
FLAGS = ("--max-queue", "8", "--no-log-requests")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = write_served_model(tmp_path_factory.mktemp("soak") / "tiny")
    with ServerProcess(folder, *FLAGS, engine=ENGINE) as running:
        yield running


@pytest.mark.timeout(SECONDS + 300)
def test_mixed_load_leaves_nothing_behind(server: ServerProcess) -> None:
    soak = Soak(server.url, server.process.pid, seed=SEED)
    warm = min(60.0, SECONDS / 4)
    report = asyncio.run(soak.run(SECONDS - warm, warm))
    assert report.failures == [], f"{report.describe()}\n{server.log[-3000:]}"
    assert "Traceback" not in server.log, server.log[-3000:]
    kinds = {kind for kind, _ in report.outcomes}
    assert len(kinds) >= 15 and report.num_requests > SECONDS
    # The load was what it should be: hard enough to preempt and to refuse.
    assert report.stats["num_preemptions"] > 0
    assert report.stats["spec_decode_num_accepted_tokens"] > 0
    assert any(outcome == "refused" for _, outcome in report.outcomes), BUSY


def test_what_is_left_is_seen() -> None:
    """The comparison can fail, on each of its counts."""
    before = Vitals(0, 0, 0.0, {"server": 9, "core": 5}, {"server": 1 << 30, "core": 1 << 30}, 7, 0)
    assert changes(before, before) == []
    for name, value, sentence in (
        ("num_running", 1, "still run"),
        ("kv_usage", 0.01, "KV cache"),
        ("files", {"server": 10, "core": 5}, "open files"),
        ("memory", {"server": 1 << 31, "core": 1 << 30}, "server grew by 1024 MiB"),
        ("core_pid", 8, "restarted"),
    ):
        after = Vitals(**{**vars(before), name: value})
        (found,) = changes(before, after)
        assert sentence in found
