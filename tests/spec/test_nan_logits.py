"""NaN in one request's KV ends that request alone, in every graph mode, with and without drafts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import LLM, SamplingParams
from stoop.checkpoint import toy
from stoop.core.outputs import RequestOutput
from stoop.core.step import StepPlan
from stoop.worker.new_blocks import fill_blocks
from stoop.worker.output import LaunchedStep
from support.drafters import DrafterStore, make_spec_llm
from support.engines import make_llm

NUM_TOKENS = 24
PROMPTS = {name: [3 + at, 5, 7, 11, 13, 17, 19, 23, 29] for at, name in enumerate("abc")}
PARAMS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    "filtered": SamplingParams(
        max_tokens=NUM_TOKENS, seed=3, top_p=0.9, top_k=20, min_p=0.01, ignore_eos=True
    ),
    "noisy": SamplingParams(max_tokens=NUM_TOKENS, seed=3, ignore_eos=True),
}
STEP: dict[str, Any] = {"graph_mode": "step", "capture_sizes": [4]}
CASES: dict[str, tuple[str | None, str, dict[str, Any]]] = {
    "eager": (None, "greedy", {}),
    "eager, filtered": (None, "filtered", {}),
    "step graph": (None, "noisy", STEP),
    "step graph, run ahead": (None, "greedy", STEP | {"run_ahead": 2}),
    "drafts": ("eagle3-some", "greedy", {}),
    "drafts, step graph": ("eagle-noisy", "noisy", STEP | {"run_ahead": 1}),
    "drawn drafts": ("eagle3-noisy", "filtered", {"draft_sample_method": "probabilistic"}),
    "prompt lookup": ("ngram-right", "greedy", {"graph_mode": "full"}),
}


def make(drafters: DrafterStore, name: str | None, options: dict[str, Any]) -> LLM:
    options = {"block_size": 4, "max_num_seqs": 4, "num_kv_blocks": 99, **options}
    options.setdefault("max_model_len", 72)
    if name is None:
        return make_llm(drafters.get("eagle-right").target, **options)
    more = {key: options.pop(key) for key in ("draft_sample_method",) if key in options}
    drafter = drafters.get(name)
    if not more:
        return make_spec_llm(drafter, 3, **options)
    return make_llm(Path(drafter.target), speculative_config=drafter.config(3, **more), **options)


def run(llm: LLM, params: SamplingParams, victim: str | None = None) -> dict[str, RequestOutput]:
    """All prompts together. The victim's KV turns into NaN once it has a few tokens."""
    engine, runner, last = llm.engine, llm.engine.runner, dict[str, RequestOutput]()
    launch, poisoned = runner.launch, list[int]()

    def spoil(plan: StepPlan) -> LaunchedStep:
        for request in engine.scheduler.running:
            if request.request_id == f"{victim}/0" and request.num_output_tokens >= 5:
                blocks = torch.tensor(request.block_ids[:1], device=runner.device)
                fill_blocks(runner.kv_caches, blocks, math.nan)
                poisoned.append(request.num_output_tokens)
        return launch(plan)

    runner.launch = spoil  # type: ignore[method-assign]
    try:
        for name, prompt in PROMPTS.items():
            engine.add_request(name, prompt, params)
        while engine.has_work:
            last.update((output.request_id, output) for output in engine.step())
    finally:
        runner.launch = launch  # type: ignore[method-assign]
    assert bool(poisoned) == (victim is not None)
    engine.scheduler.check_idle()
    engine.scheduler.pool.check()
    return last


@pytest.mark.parametrize("case", CASES)
def test_nan_ends_one_request_alone(drafters: DrafterStore, case: str) -> None:
    drafter, kind, options = CASES[case]
    llm = make(drafters, drafter, options)
    expected = run(llm, PARAMS[kind])
    assert {o.outputs[0].finish_reason for o in expected.values()} == {"length"}
    assert llm.reset_prefix_cache()
    found = run(llm, PARAMS[kind], victim="b")
    for name in "ac":
        assert found[name].outputs[0].token_ids == expected[name].outputs[0].token_ids
    answer = found["b"].outputs[0]
    assert answer.finish_reason == "error" and "NaN" in str(answer.stop_reason)
    # What it said before is right, and there is no token after that.
    whole = expected["b"].outputs[0].token_ids
    assert 5 <= len(answer.token_ids) < NUM_TOKENS
    assert answer.token_ids == whole[: len(answer.token_ids)]
    assert all(0 <= token < toy.SIZE for token in answer.token_ids)
    # Its blocks are not found again: the same prompts have the same answers as before.
    again = run(llm, PARAMS[kind])
    for name in "abc":
        assert again[name].outputs[0].token_ids == expected[name].outputs[0].token_ids
    assert again["b"].num_cached_tokens == 0
    assert again["a"].num_cached_tokens == 8


def test_nan_after_accepted_drafts_keeps_them(drafters: DrafterStore) -> None:
    """Without a token after them, accepted drafts are still the target's own."""
    llm = make_spec_llm(drafters.get("eagle-right"), 3, max_num_seqs=4)
    engine, runner = llm.engine, llm.engine.runner
    params = PARAMS["greedy"]
    (whole,) = (o.outputs[0].token_ids for o in llm.generate([PROMPTS["a"]], params))
    logits, num_calls = runner.model.logits, [0]

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        num_calls[0] += 1
        if num_calls[0] == 4:  # a decode of one row: the positions of its three drafts and the last
            assert found.shape[0] == 4
            found[2] = math.nan
        return found

    runner.model.logits = broken
    engine.add_request("a", PROMPTS["a"], params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    answer = outputs[-1].outputs[0]
    assert answer.finish_reason == "error" and len(answer.token_ids) == 1 + 4 + 4 + 2
    assert answer.token_ids == whole[: len(answer.token_ids)]
    assert answer.spec is not None and answer.spec.num_accepted_tokens == 3 + 3 + 2


@pytest.mark.parametrize("method", ["eagle-right", "eagle3-some"])
@pytest.mark.parametrize("options", [{}, STEP], ids=["eager", "step graph"])
def test_nan_in_the_first_row_reads_no_place_before_the_batch(
    drafters: DrafterStore, method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without any token has no last valid place: draft prefill must still read inside."""
    llm = make(drafters, method, options)
    engine = llm.engine
    found: list[int] = []
    step = engine.step

    def watched() -> list[RequestOutput]:
        outputs = step()
        inputs = engine.runner.speculator.prefill_inputs  # type: ignore[union-attr]
        found.append(int(inputs.last_token_indices.min()))
        return outputs

    monkeypatch.setattr(engine, "step", watched)
    last = run(llm, PARAMS["greedy"], victim="a")
    assert last["a"].outputs[0].finish_reason == "error"
    assert {last[name].outputs[0].finish_reason for name in "bc"} == {"length"}
    assert min(found) >= 0
