"""Graphs on a CUDA device: the backend's semantics, and modes of the engine against eager."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import LLM, SamplingParams
from stoop.check.graphs import TINY, TINY_CONFIG, run_checks, tiny_model
from stoop.config.resolve import GRAPH_MODES
from stoop.graph.cuda import CudaGraphBackend
from stoop.graph.descriptor import RunMode
from support.device_waits import forbid_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def backend() -> CudaGraphBackend:
    return CudaGraphBackend(torch.device("cuda", torch.cuda.current_device()))


def test_capture_executes_nothing_and_replay_follows_its_inputs(backend: CudaGraphBackend) -> None:
    x, out = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    factor = [2.0]
    program = backend.capture(lambda: out.copy_(x * factor[0] + 1))
    torch.cuda.synchronize()
    assert out.tolist() == [0.0] * 8
    factor[0] = 100.0  # a host value is the capture's
    for value in (1.0, 5.0):
        x.fill_(value)
        program.replay()
        assert out.tolist() == [2 * value + 1] * 8


def test_host_calls_run_between_pieces(backend: CudaGraphBackend) -> None:
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    seen = []

    def middle(context: str, a: torch.Tensor, b: torch.Tensor) -> None:
        seen.append(context)
        b.copy_(a * 10)

    def program() -> None:
        doubled = x * 2
        between = torch.empty_like(doubled)
        backend.host_call(middle, doubled, between)
        out.copy_(between + 1)

    captured = backend.capture(program)
    assert (seen, len(captured)) == ([], 3)
    for value in (1.0, 3.0):
        x.fill_(value)
        captured.replay("context")
        assert out.tolist() == [20 * value + 1] * 4
    assert seen == ["context"] * 2


def test_a_refused_capture_leaves_the_backend_usable(backend: CudaGraphBackend) -> None:
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError):
        backend.capture(lambda: (x * 2).sum().item())
    program = backend.capture(lambda: out.copy_(x + 1))
    program.replay()
    assert out.tolist() == [2.0] * 4


def test_a_replayed_decode_step_does_not_wait_for_the_device(tiny: str) -> None:
    """Pieces and the attention between them are only launched, from inputs to update."""
    options = {"load_format": "dummy", "device": "cuda", "skip_tokenizer_init": True}
    llm = LLM(tiny, graph_mode="piecewise", kv_cache_memory="64MiB", max_num_seqs=4, **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = llm.generate([[1, 2, 3], [4, 5]], params)  # first launches may wait
    modes = forbid_waits(llm)
    again = llm.generate([[1, 2, 3], [4, 5]], params)
    assert modes.count(RunMode.PIECEWISE) >= 11
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    return str(tmp_path)


def test_every_mode_equals_eager_under_the_sanitizer(tiny: str) -> None:
    engine = {"load_format": "dummy", "device": "cuda", "num_kv_blocks": 64}
    modes = ("piecewise", "full", "step")
    cases = list(run_checks(tiny, modes, ("reference", "hostplan"), engine, lambda *_: None))
    assert [failure for case in cases for failure in case.failures] == []
    assert len(cases) == 6
    # Plain-torch attention cannot be captured on a GPU: all come down to the same pieces.
    assert len({case.num_graphs for case in cases}) == 1 and cases[0].num_used > 0


@pytest.mark.parametrize("method", [None, "eagle", "eagle3", "ngram"])
def test_kernels_in_every_mode_equal_eager_under_the_sanitizer(method: str | None) -> None:
    engine: dict[str, Any] = {"device": "cuda"}
    if method is not None:
        engine["speculative_config"] = {"method": method, "num_speculative_tokens": 3}
    if method in ("eagle", "eagle3"):
        engine["speculative_config"]["model"] = "tiny"
    with tiny_model(TINY, engine) as (folder, options):
        cases = list(run_checks(folder, GRAPH_MODES[1:], ("triton",), options, lambda *_: None))
    assert [failure for case in cases for failure in case.failures] == []
    assert [case.mode for case in cases] == list(GRAPH_MODES[1:])
    assert all(case.num_used == case.num_graphs > 0 for case in cases)


@pytest.mark.parametrize("name", [TINY, "tiny-qwen3.5"])
def test_many_prompts_run_in_large_graphs_by_default(name: str) -> None:
    """A small model's prompts of a whole step are one graph, and answer as they do without."""
    prompts = [[(7 * i + 3 * j) % 97 for i in range(40 + j)] for j in range(60)]  # 4,170 tokens
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine: dict[str, Any] = {"device": "cuda", "max_num_seqs": 64, "max_num_batched_tokens": 6000}
    engine |= {"skip_tokenizer_init": True, "kv_cache_memory": "64MiB", "dtype": "float32"}
    answers, steps = [], []
    with tiny_model(name, engine) as (folder, options):
        options.pop("capture_sizes", None)
        for mode in ("none", "full"):
            llm = LLM(folder, **options, graph_mode=mode)
            found = llm.generate(prompts, params)
            answers.append([list(each.outputs[0].token_ids) for each in found])
            steps.append(set(llm.metrics()["num_steps_by_mode"]))
            assert llm.metrics()["num_steps"] <= 6
    assert answers[0] == answers[1]
    assert steps == [{"none"}, {"full"}]
