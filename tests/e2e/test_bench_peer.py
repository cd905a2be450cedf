"""`stoop bench peer`, with a vLLM of a few lines whose clock is known."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stoop.bench.peer import PeerLoad, PeerResult, measure_vllm, measure_vllm_loads
from stoop.bench.throughput import Traffic
from stoop.cli.main import main
from stoop.config.errors import ConfigError

# A step takes 2 ms and 0.25 ms a request, a prompt token 0.01 ms; 8 ms pass before a call begins.
VLLM = """
import cProfile, json, os, time
from types import SimpleNamespace

__version__ = "9.9"
now = [0.0]
time.perf_counter = lambda: now[0]
SHARE = float(os.environ.get("FAKE_SHARE", "0"))  # of the tokens that are accepted drafts


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, **options):
        now[0] += 50.0
        self.num_accepted = 0
        with open(os.environ["FAKE_SEEN"], "w") as file:
            json.dump(options, file)
        self.speculates = "speculative_config" in options
        places = [options["model"]]
        if self.speculates:
            places.append(options["speculative_config"]["model"])
        for place in places:
            config = json.load(open(place + "/config.json"))
            assert config["max_position_embeddings"] >= options["max_model_len"]
        print("vllm says something first")

    def generate(self, prompts, params, use_tqdm):
        accepted = int(SHARE * params.max_tokens) if self.speculates else 0
        self.num_accepted += accepted * len(prompts)
        steps = params.max_tokens - accepted
        num_prompt = sum(len(p["prompt_token_ids"]) for p in prompts)
        now[0] += 0.008 + 1e-5 * num_prompt + steps * (0.002 + 0.00025 * len(prompts))

    def get_metrics(self):
        return [
            SimpleNamespace(name="vllm:other", value=77),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=self.num_accepted),
        ]


import atexit
atexit.register(lambda: print("vllm says something last"))
"""

# Only where an engine was made, at the very end.
ACCIDENT = """
begin = LLM.__init__

def begin_and_fail(self, **options):
    begin(self, **options)
    atexit.register(lambda: os._exit(3))

LLM.__init__ = begin_and_fail
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the options end that vLLM was started with."""
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen.json"))
    return tmp_path / "seen.json"


def load(**changes: Any) -> PeerLoad:
    settings = {
        **{"shape": "llama-8b", "k": 3, "batch": [1, 8], "prompt_len": 512},
        **{"first_token": [512, 4096], "steps": 64, "repeat": 3},
    }
    return PeerLoad(**(settings | changes))


def measure(**changes: Any) -> PeerResult:
    return measure_vllm(load(**changes), sys.executable)


@pytest.mark.parametrize("share", [0, 0.25])
def test_steps_and_first_tokens(seen: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Accepted drafts take no steps of their own."""
    monkeypatch.setenv("FAKE_SHARE", str(share))
    found = measure()
    assert found.engine == "vllm 9.9" and found.start_s == pytest.approx(50)
    assert found.ms_per_step == pytest.approx({1: 2.25, 8: 4.0})
    assert found.first_token_ms == pytest.approx({512: 8 + 5.12 + 2.25, 4096: 8 + 40.96 + 2.25})


def test_the_peer_serves_what_we_serve(seen: Path) -> None:
    measure()
    options = json.loads(seen.read_text())
    assert options["load_format"] == "dummy" and options["enable_prefix_caching"] is False
    assert options["max_model_len"] > 4096 + 64
    assert options["speculative_config"]["num_speculative_tokens"] == 3
    assert {4, 32} <= set(options["compilation_config"]["cudagraph_capture_sizes"])


@pytest.mark.parametrize("steps", [1, 16, 4096])
def test_the_model_has_as_many_positions_as_are_asked_for(seen: Path, steps: int) -> None:
    measure(first_token=[8192], steps=steps, repeat=1)
    longest = json.loads(seen.read_text())["max_model_len"]
    assert longest >= 8192 + steps + 24


def test_an_accident_behind_the_result_does_not_matter(seen: Path) -> None:
    fake = seen.parent / "vllm.py"
    fake.write_text(VLLM + ACCIDENT)
    assert measure().engine == "vllm 9.9"


def test_without_drafts_there_is_no_head(seen: Path) -> None:
    found = measure(k=0, first_token=[])
    assert "speculative_config" not in json.loads(seen.read_text())
    assert found.first_token_ms == {}


def test_the_command_prints_a_record(
    seen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--batch", "1,8", "--first-token", "512", "--python", sys.executable]
    monkeypatch.setattr(sys, "argv", ["stoop", "bench", "peer", *args])
    with pytest.raises(SystemExit) as left:
        main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert left.value.code == 0
    assert record["bench"] == "peer" and record["ms_per_step"] == {"1": 2.25, "8": 4.0}


def test_throughput_by_load(seen: Path) -> None:
    """Groups of requests: 4 of 1, 4 of 8; with 5 requests one group of 3 and one of 2."""
    traffic = Traffic((1, 8), 512, 64)
    found = measure_vllm_loads("llama-8b", traffic, [0, 3], 2, sys.executable)
    assert found.engine == "vllm 9.9"
    one, eight = 0.008 + 0.00512 + 64 * 0.00225, 0.008 + 0.04096 + 64 * 0.004
    for k in (0, 3):
        assert found.tokens_per_s[1, k] == pytest.approx([64 / one] * 2)
        assert found.tokens_per_s[8, k] == pytest.approx([8 * 64 / eight] * 2)
    options = json.loads(seen.read_text())
    assert options["speculative_config"]["num_speculative_tokens"] == 3
    assert {4, 32} <= set(options["compilation_config"]["cudagraph_capture_sizes"])
    few = Traffic((3,), 512, 64, num_requests=5)
    speeds = measure_vllm_loads("llama-8b", few, [0], 1, sys.executable).tokens_per_s[3, 0]
    three, two = (0.008 + n * 0.00512 + 64 * (0.002 + 0.00025 * n) for n in (3, 2))
    assert speeds == pytest.approx([5 * 64 / (three + two)])


def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="use llama-8b"):
        load(shape="gpt-9")
    with pytest.raises(ConfigError, match="use 1 to"):
        load(k=99)
    with pytest.raises(ConfigError, match="cannot be run"):
        measure_vllm(load(), str(tmp_path / "nothing"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="has no vllm: pip install vllm"):
        measure()
    (tmp_path / "vllm.py").write_text("raise ImportError('no such kernels')")
    with pytest.raises(ConfigError, match="status 1"):
        measure()
    assert "no such kernels" in capfd.readouterr().err
    (tmp_path / "vllm.py").write_text("class SamplingParams: pass\nprint('out of memory')")
    with pytest.raises(ConfigError, match="status 1"):
        measure()
    assert "out of memory" in capfd.readouterr().err
