"""Speculation on a CUDA device: answers of plain decoding, drafts of eager steps, no waits."""

import random
from typing import Any

import pytest
import torch

from stoop.check.workloads import GREEDY, SEEDED
from stoop.graph.descriptor import RunMode
from support.device_waits import forbid_waits
from support.drafters import MODES, DrafterStore, make_spec_llm, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}


@pytest.mark.parametrize("name", ["eagle-noisy", "eagle3-noisy", "eagle3-variant", "ngram-right"])
def test_float64_is_the_cpus(drafters: DrafterStore, name: str) -> None:
    """The torch path on the GPU: answers and drafts, place by place."""
    drafter = drafters.get(name)
    options: dict[str, Any] = {"device": "cuda", "attention_backend": "reference", "run_ahead": 0}
    ours = run(make_spec_llm(drafter, 3, **options), 3)
    theirs = run(make_spec_llm(drafter, 3), 3)
    assert ours.answers == theirs.answers
    assert ours.drafts == theirs.drafts


@pytest.mark.parametrize(
    ("name", "mode", "num_tokens"),
    [
        (name, mode, (1, 3, 8)[(row + column) % 3])  # every pair of two of them
        for row, name in enumerate(("eagle-noisy", "eagle3-some", "ngram-right"))
        for column, mode in enumerate(MODES)
    ],
)
def test_kernels_and_graphs_answer_as_plain_decoding(
    drafters: DrafterStore, name: str, mode: str, num_tokens: int
) -> None:
    """Each replay is compared with its eager twin to the bit by the sanitizer."""
    drafter = drafters.get(name)
    plain = run(make_spec_llm(drafter, 0, dtype="float32"), 0)
    sanitize = mode != "none"
    llm = make_spec_llm(drafter, num_tokens, graph_mode=mode, sanitize=sanitize, **KERNELS)
    trace = run(llm, num_tokens)
    assert trace.answers == plain.answers
    assert sum(trace.per_position) > (3 if name == "ngram-right" else 20)
    modes = {d.mode for d in llm.engine.runner.lane.descriptors}
    expected = {"full": {RunMode.FULL}, "step": {RunMode.STEP, RunMode.FULL}}
    assert modes >= expected.get(mode, set())  # kernels are captured whole


@pytest.mark.parametrize("mode", ["none", "full", "step"])
@pytest.mark.parametrize("name", ["eagle3-some", "ngram-right"])
def test_steps_in_flight_change_nothing(drafters: DrafterStore, name: str, mode: str) -> None:
    """Nobody looks at the device in between: launches overlap as far as they may."""
    source = random.Random(3)
    prompts = [[source.randrange(60) for _ in range(source.randint(1, 40))] for _ in range(24)]
    params = [
        GREEDY.replace(max_tokens=source.randint(1, 30), stop_token_ids=[source.randrange(60)])
        for _ in prompts
    ]

    def answers(num_tokens: int, run_ahead: int) -> list[Any]:
        llm = make_spec_llm(
            drafters.get(name), num_tokens, graph_mode=mode, run_ahead=run_ahead, **KERNELS
        )
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        return [(o.token_ids, o.finish_reason, o.stop_reason) for o in outputs]

    plain = answers(0, 0)
    assert {reason for _, reason, _ in plain} == {"stop", "length"}
    for num_tokens, run_ahead in ((0, 3), (3, 0), (3, 1), (3, 3)):
        assert answers(num_tokens, run_ahead) == plain, (num_tokens, run_ahead)


def test_a_head_that_is_right_gives_k_plus_1_tokens_a_step(drafters: DrafterStore) -> None:
    right, options = drafters.get("eagle3-right"), {**KERNELS, "run_ahead": 0}
    llm = make_spec_llm(right, 3, graph_mode="step", **options)
    params = GREEDY.replace(max_tokens=1 + 5 * 4)
    before = llm.metrics()["num_steps"]
    (output,) = llm.generate([[5]], params)
    assert llm.metrics()["num_steps"] - before == 6
    assert output.outputs[0].spec.num_accepted_tokens_per_pos == [5, 5, 5]


@pytest.mark.parametrize("mode", ["full", "step"])
def test_a_replayed_step_waits_for_nobody(drafters: DrafterStore, mode: str) -> None:
    """From the inputs to the last draft, nothing makes the host wait."""
    llm = make_spec_llm(drafters.get("eagle3-right"), 3, graph_mode=mode, **KERNELS)
    seen = forbid_waits(llm, decodes_only=True)
    llm.generate([[5], [6, 7]], GREEDY)
    assert set(seen) == {RunMode.STEP if mode == "step" else RunMode.FULL}


@pytest.mark.parametrize("method", ["coupled", "probabilistic"])
@pytest.mark.parametrize("mode", ["none", "step"])
def test_drawn_drafts_are_seeded_whatever_else_is_in_the_batch(
    drafters: DrafterStore, mode: str, method: str
) -> None:
    params = SEEDED.replace(temperature=1.3, max_tokens=12)
    spec = {"draft_sample_method": method}
    llm = make_spec_llm(drafters.get("eagle3-random"), 3, graph_mode=mode, spec=spec, **KERNELS)
    (alone,) = llm.generate([[5, 6]], params)
    others = [params.replace(seed=seed) for seed in (1, 2)]
    *_, among = llm.generate([[9], [8, 7], [5, 6]], [*others, params])
    assert alone.outputs[0].token_ids == among.outputs[0].token_ids
