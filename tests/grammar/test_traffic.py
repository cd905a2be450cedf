"""Random traffic with and without grammars: every answer is what its request gets alone."""

import random
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM, SamplingParams
from stoop.core.outputs import RequestOutput
from support.grammars import make_grammar_llm, tell

COUNT = 28
INTEGERS = {"type": "integer", "minimum": 100, "maximum": 999}
ASKED = [
    {"regex": "[a-f]{12}"},
    {"choice": ["yes", "nope", "name"]},
    {"json": {"type": "array", "items": INTEGERS, "minItems": 2, "maxItems": 6}},
    {"regex": "(ab|name)[0-9]{4}", "after": "e"},
    {"regex": "[a-z]{3,9}", "after": "a"},
]


def random_params(source: random.Random) -> SamplingParams:
    options: dict[str, Any] = {}
    for chance, more in (
        (0.3, {"top_k": source.choice([1, 5, 20])}),
        (0.3, {"top_p": 0.8}),
        (0.3, {"repetition_penalty": 1.3, "presence_penalty": 0.5}),
        (0.2, {"logit_bias": {source.randrange(256): 5.0}}),
        (0.3, {"logprobs": 2}),
        (0.5, {"structured_outputs": source.choice(ASKED)}),
    ):
        if source.random() < chance:
            options |= more
    return SamplingParams(
        max_tokens=source.randrange(1, 40),
        temperature=source.choice([0, 0, 1.0]),
        seed=source.randrange(99),
        **options,
    )


def serve(
    llm: LLM, source: random.Random, prompts: list[list[int]], params: list[SamplingParams]
) -> dict[int, RequestOutput]:
    """Requests come at random, with limits on drafts of their own, and some are aborted."""
    engine, waiting = llm.engine, random.Random(source.random()).sample(range(COUNT), COUNT)
    running, done = set[str](), dict[int, RequestOutput]()
    while waiting or engine.has_work:
        for _ in range(min(source.randrange(3), len(waiting))):
            name = waiting.pop()
            limit = source.choice([None, None, 0, 1, 2])
            chosen = params[name].replace(num_speculative_tokens=limit)
            engine.add_request(str(name), prompts[name], chosen)
            running.add(str(name))
        if running and source.random() < 0.08:
            gone = source.choice(sorted(running))
            running.remove(gone)
            engine.abort_request(gone)
        for output in engine.step():
            if output.finished:
                running.discard(output.request_id)
                done[int(output.request_id)] = output
    engine.scheduler.check_idle()
    engine.scheduler.pool.check()
    return done


@pytest.mark.parametrize("captured", [False, True])
def test_neighbours_aborts_and_reused_slots_change_nothing(model: Path, captured: bool) -> None:
    source = random.Random(captured)
    prompts = [[name, *(source.randrange(256) for _ in range(name * 2))] for name in range(COUNT)]
    params = [random_params(source) for _ in range(COUNT)]
    plain = make_grammar_llm(model)
    wanted = [
        list(plain.generate([prompt], each, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt, each in zip(prompts, params, strict=True)
    ]
    llm = make_grammar_llm(
        model,
        run_ahead=2,
        num_kv_blocks=28,
        max_num_seqs=4,
        capture_sizes="1,4,16",
        graph_mode="step",
        capture_structured=captured,
        speculative_config={"method": "oracle", "num_speculative_tokens": 3},
    )
    tell(prompts, wanted, 0.3)
    done = serve(llm, source, prompts, params)
    assert len(done) > COUNT // 2
    for name, output in done.items():
        assert list(output.outputs[0].token_ids) == wanted[name], name
    modes = llm.metrics()["num_steps_by_mode"]
    assert modes["step"] and (captured or modes["full"])
