"""Random schemas: answers validate, and speculation changes none of them."""

import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stoop import LLM, SamplingParams
from stoop.core.outputs import CompletionOutput
from support.draft_policies import RandomDrafts
from support.grammars import make_grammar_llm, schema_params, tell

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
COUNT = 60
MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "step")
K = 3


def make_prompts(count: int) -> list[list[int]]:
    """The first token is the request's name."""
    source = random.Random(11)
    return [
        [name, *(source.randrange(256) for _ in range(source.choice((0, 3, 17, 70))))]
        for name in range(count)
    ]


def answer(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput]:
    outputs = llm.generate(make_prompts(len(params)), params, use_tqdm=False)  # type: ignore[arg-type]
    return [output.outputs[0] for output in outputs]


def ids(answers: list[CompletionOutput]) -> list[list[int]]:
    return [list(each.token_ids) for each in answers]


def check_valid(schemas: list[Any], answers: list[CompletionOutput]) -> None:
    num_complete = 0
    for schema, each in zip(schemas, answers, strict=True):
        assert each.finish_reason in ("stop", "length"), each
        if each.finish_reason == "stop":
            num_complete += 1
            jsonschema.validate(json.loads(each.text), schema)
    assert num_complete > len(answers) // 2


def oracle(llm_options: dict[str, Any] | None = None) -> dict[str, Any]:
    spec = {"method": "oracle", "num_speculative_tokens": K}
    return {"speculative_config": spec} | (llm_options or {})


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}])
@pytest.mark.parametrize("number", range(20 if EVERY else 2))
def test_answers_validate_and_drafts_change_nothing(
    model: Path, number: int, options: dict[str, Any]
) -> None:
    schemas, params = schema_params(COUNT, 2 * number + bool(options), **options)
    plain = answer(make_grammar_llm(model), params)
    check_valid(schemas, plain)
    llm = make_grammar_llm(model, **oracle())
    for wrong in (0.0, 0.3):
        tell(make_prompts(COUNT), ids(plain), wrong)
        drafted = answer(llm, params)
        assert ids(drafted) == ids(plain)
        assert [each.finish_reason for each in drafted] == [each.finish_reason for each in plain]
        accepted = sum(each.spec.num_accepted_tokens for each in drafted if each.spec)
        assert accepted > sum(map(len, ids(plain))) * (0.6 if not wrong else 0.1)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_graphs_change_nothing(model: Path, mode: str, captured: bool) -> None:
    if not captured and mode != "step":
        pytest.skip("the same graphs")
    count = 16
    _, params = schema_params(count, 7)
    for place in range(0, count, 3):  # greedy, sampled and plain requests in the same batches
        params[place] = params[place].replace(temperature=1.0, seed=place)
    for place in range(1, count, 5):
        params[place] = SamplingParams(temperature=0, max_tokens=12)
    wanted = ids(answer(make_grammar_llm(model), params))
    llm = make_grammar_llm(
        model,
        graph_mode=mode,
        capture_structured=captured,
        sanitize=mode != "none",
        **oracle(),
    )
    tell(make_prompts(count), wanted, 0.3)
    assert ids(answer(llm, params)) == wanted
    managers = llm.engine.runner.executor.managers
    if mode == "step":
        assert ("VUO" in managers) == captured
        assert "ICVUO" in managers


HEADS = [(1, "reference"), (3, "reference"), (5, "hostplan")] if EVERY else []


@pytest.mark.parametrize(("num_drafts", "backend"), [(3, "hostplan"), *HEADS])
def test_heads_in_graphs_change_nothing(
    model: Path, head: Path, num_drafts: int, backend: str
) -> None:
    """With `hostplan`, draft decodes are graphs of their own. Some requests want fewer drafts."""
    _, params = schema_params(10, 5)
    params[::2] = [each.replace(num_speculative_tokens=1) for each in params[::2]]
    params[3] = params[3].replace(num_speculative_tokens=0)
    spec = {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_drafts}
    llm = make_grammar_llm(
        model,
        speculative_config=spec,
        graph_mode="step",
        capture_sizes="8",
        capture_structured=True,
        sanitize=True,
        attention_backend=backend,
    )
    plain = make_grammar_llm(model)
    loose = [each.replace(num_speculative_tokens=None) for each in params]
    assert ids(answer(llm, params)) == ids(answer(plain, loose))
    last = "VUPD" if backend == "reference" and num_drafts > 1 else "VUP"
    assert last in llm.engine.runner.executor.managers


@pytest.mark.parametrize("method", ["oracle", "eagle3"])
@pytest.mark.parametrize("mode", ["step", "full", "none"])
def test_the_number_of_drafts_changes_nothing(
    model: Path, head: Path, method: str, mode: str
) -> None:
    """Masks are as wide as the step has places, and drafts without a place are never masked."""
    count = 16
    _, params = schema_params(count, 13)
    params[::3] = [each.replace(temperature=1.0, seed=4) for each in params[::3]]
    params[1::5] = [SamplingParams(temperature=0, max_tokens=12)] * len(params[1::5])
    wanted = ids(answer(make_grammar_llm(model), params))
    eager = mode == "none"
    spec = {"method": method, "num_speculative_tokens": K}
    if not eager:
        spec["adaptive"] = True
    if method == "eagle3":
        spec["model"] = str(head)
    llm = make_grammar_llm(
        model,
        speculative_config=spec,
        graph_mode=mode,
        sanitize=not eager,
        **({} if eager else {"capture_sizes": "8", "capture_structured": True}),
    )
    llm.engine.core.drafts = policy = RandomDrafts((0, 1, 3), seed=2, eager=eager)
    tell(make_prompts(count), wanted, 0.3)
    answers = answer(llm, params)
    assert ids(answers) == wanted and set(policy.chosen) == {0, 1, 3}
    verified = [each.spec.num_draft_tokens_per_pos for each in answers if each.spec]
    assert sum(counts[0] for counts in verified) > sum(counts[2] for counts in verified) > 0


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        {"method": "eagle3"},
        {"method": "eagle3", "draft_sample_method": "probabilistic"},
        {"method": "eagle3", "draft_sample_method": "coupled"},
    ],
)
def test_other_drafters_change_nothing(model: Path, head: Path, spec: dict[str, Any]) -> None:
    schemas, params = schema_params(24, 3)
    sampled = [each.replace(temperature=1.0, seed=9) for each in params]
    probabilistic = spec.get("draft_sample_method") == "probabilistic"
    spec = {"num_speculative_tokens": K, **spec}
    if spec["method"] == "eagle3":
        spec["model"] = str(head)
    plain, llm = make_grammar_llm(model), make_grammar_llm(model, speculative_config=spec)
    for each in (params, sampled):
        answers = answer(llm, each)
        check_valid(schemas, answers)
        # Drafts with noise of their own keep the distribution, not the tokens.
        if each is params or not probabilistic:
            assert ids(answers) == ids(answer(plain, each))
