"""Graphs of more tokens than the default sizes have."""

from typing import Any

import pytest

from stoop import SamplingParams
from stoop.check.graphs import TINY, tiny_model
from support.engines import generate_ids, make_llm

PROMPTS = [[i % 97 for i in range(500)], [5] * 330, [1, 2, 3]]  # 833 tokens
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("name", [TINY, "tiny-qwen3.5"])
def test_a_batch_of_prompts_runs_in_a_large_graph_and_equals_eager(name: str) -> None:
    """Under the sanitizer: attention's tiles and the chunks of scans are made in the graph."""
    spec = {"method": "eagle3", "model": "tiny", "num_speculative_tokens": 2}
    engine: dict[str, Any] = {"device": "cpu", "speculative_config": spec}
    engine |= {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 1000}
    answers = []
    with tiny_model(name, engine) as (folder, options):
        for graphs in (
            {"graph_mode": "none"},
            {"graph_mode": "full", "max_capture_size": 1000, "sanitize": True},
        ):
            llm = make_llm(folder, **options, **graphs)
            answers.append(generate_ids(llm, PROMPTS, GREEDY))
        steps = llm.metrics()["num_steps_by_mode"]
    assert answers[0] == answers[1]
    assert set(steps) == {"full"}
    assert llm.metrics()["num_tokens_padded"] >= 896 - 833
