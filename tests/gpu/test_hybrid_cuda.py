"""Hybrids on a CUDA device: every graph replay equals its eager twin, states too."""

from typing import Any

import pytest
import torch

from stoop import LLM, SamplingParams
from stoop.check.graphs import TINY, TINY_CONFIGS, run_checks, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HYBRIDS = [name for name in TINY_CONFIGS if name != TINY]


@pytest.mark.parametrize("method", ["eagle3", "ngram"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_kernels_in_graphs_equal_eager_under_the_sanitizer(name: str, method: str) -> None:
    spec = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle3":
        spec["model"] = "tiny"
    assert_graphs_equal_eager(name, spec)


def test_an_mtp_head_in_graphs_equals_eager_under_the_sanitizer() -> None:
    assert_graphs_equal_eager("tiny-qwen3.5", {"method": "mtp", "num_speculative_tokens": 3})


def assert_graphs_equal_eager(name: str, spec: dict[str, Any]) -> None:
    engine: dict[str, Any] = {"device": "cuda", "speculative_config": spec}
    modes = ("piecewise", "full", "step")
    with tiny_model(name, engine) as (folder, options):
        cases = list(run_checks(folder, modes, ("triton",), options, lambda *_: None))
    assert [failure for case in cases for failure in case.failures] == []
    assert all(case.num_used == case.num_graphs > 0 for case in cases)


@pytest.mark.parametrize("name", HYBRIDS)
def test_answers_are_the_same_with_a_cache_of_states(name: str) -> None:
    """Snapshots are saved and restored between graphs, and hits skip what they hold."""
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    shared = [11 * i % 97 for i in range(70)]
    prompts = [shared[:n] for n in (1, 15, 16, 17, 33, 64, 70)]
    prompts += [[*shared[:n], 90, 91, n] for n in (16, 40, 64)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"graph_mode": "step", "skip_tokenizer_init": True}
    settings |= {
        "max_num_seqs": 4,
        "max_model_len": 128,
        "state_cache_memory": "8MiB",
        "num_kv_blocks": 64,
    }
    answers = []
    for enabled in (False, True):
        engine: dict[str, Any] = {"device": "cuda", "speculative_config": spec}
        with tiny_model(name, engine) as (folder, options):
            llm = LLM(folder, **options, **settings, enable_prefix_caching=enabled)
            found = [
                [o.outputs[0].token_ids for o in llm.generate(given, params, use_tqdm=False)]
                for given in (prompts, prompts, [[*prompt, 5, 6] for prompt in prompts])
            ]
            metrics = llm.metrics()
        answers.append(found)
        assert (metrics["state_cache_snapshots_restored"] > 5) == enabled
    assert answers[0] == answers[1]
