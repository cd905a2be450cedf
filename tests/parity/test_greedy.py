"""Greedy token ids equal Hugging Face transformers', however the engine is driven."""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from stoop import LLM
from support.checkpoints import (
    ARCHITECTURES,
    HYBRIDS,
    PLAIN,
    VARIANTS,
    CheckpointStore,
    copy_with_eos,
)
from support.crossings import EVERY, caching_prefixes, models_with
from support.engines import MakeEngine
from support.huggingface import (
    TIE_GAPS,
    HuggingFace,
    Reference,
    ReferenceStore,
    answer_ids,
    greedy_params,
    make_prompt,
    mismatches,
    run_greedy,
)

# Around the edges of blocks of 16 and 32, and far beyond the window of the windowed models.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 150, 300)
NUM_TOKENS = 32 if EVERY else 24
MAX_MODEL_LEN = 352
PROMPTS = [make_prompt(length) for length in LENGTHS]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks-of-16": {"max_num_batched_tokens": 16},
    "chunks-of-37": {"max_num_batched_tokens": 37},
    "whole-prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_MODEL_LEN},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "three-slots": {"max_num_seqs": 3},
    "blocks-of-1": {"block_size": 1},
    "blocks-of-4-chunks": {"block_size": 4, "max_num_batched_tokens": 50},
    "blocks-of-32": {"block_size": 32},
}
# As few blocks as one request of full length needs, and the null block.
TIGHT_SETTINGS: dict[str, dict[str, Any]] = {
    "blocks-of-16": {"num_kv_blocks": MAX_MODEL_LEN // 16 + 1},
    "blocks-of-4-chunks": {
        "num_kv_blocks": MAX_MODEL_LEN // 4 + 1,
        "block_size": 4,
        "max_num_batched_tokens": 37,
    },
    "no-prefix-cache-whole-prompts": {
        "num_kv_blocks": MAX_MODEL_LEN // 16 + 1,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
    },
}


def dtype_of(turn: int) -> str:
    """Every other model in float64, which tells a wrong engine from rounding best: most references
    are then worked out once."""
    return list(TIE_GAPS)[turn % len(TIE_GAPS)]


def crossed(settings: Iterable[str], share: int, variants: bool = False) -> pytest.MarkDecorator:
    """Every setting with some models, by turns; all of it in both dtypes with `make test-all`.

    share: of so many models, a setting takes one
    variants: hybrids take two settings and their variants one; else hybrids take one
    """
    names = list(settings)
    if EVERY:
        found = list(itertools.product(ARCHITECTURES, TIE_GAPS, names))
    else:
        found = [
            (name, dtype_of(n), setting)
            for (s, setting), (n, name) in itertools.product(enumerate(names), enumerate(PLAIN))
            if (s + n) % share == 0
        ]
        for n, name in enumerate((*HYBRIDS, *VARIANTS) if variants else HYBRIDS):
            count = 2 if variants and name in HYBRIDS else 1
            turns = ((5 * n + 7 * k) % len(names) for k in range(count))
            found += [(name, dtype_of(n), names[turn]) for turn in turns]
    return pytest.mark.parametrize(("name", "dtype", "setting"), found)


def expected(
    model: HuggingFace, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS
) -> list[Reference]:
    return [model.greedy(prompt, num_tokens) for prompt in prompts]


@models_with("dtype", list(TIE_GAPS), variants=True)
def test_reference_is_sound(references: ReferenceStore, name: str, dtype: str) -> None:
    """The oracle with a cache agrees with itself without one, varies, and seldom meets a tie."""
    wanted = expected(references.get(name, 0, dtype), PROMPTS)
    for reference in wanted:
        assert reference.step_logits.argmax(dim=1).tolist() == reference.token_ids
    gaps = [gap for reference in wanted for gap in reference.gaps]
    assert sum(gap < TIE_GAPS[dtype] for gap in gaps) <= 0.01 * len(gaps)
    num_distinct = [len(set(reference.token_ids)) for reference in wanted]
    assert sum(num_distinct) > NUM_TOKENS * len(wanted) / 3


@crossed(SETTINGS, share=5, variants=True)
def test_mixed_batch(
    references: ReferenceStore, make_engine: MakeEngine, name: str, dtype: str, setting: str
) -> None:
    wanted = expected(references.get(name, 0, dtype), PROMPTS)
    options = caching_prefixes(name, SETTINGS[setting])
    llm = make_engine(name, dtype=dtype, max_model_len=MAX_MODEL_LEN, **options)
    found = run_greedy(llm, PROMPTS, NUM_TOKENS)
    assert mismatches(found, wanted, TIE_GAPS[dtype]) == []


@crossed(TIGHT_SETTINGS, share=3)
def test_preemption(
    references: ReferenceStore, make_engine: MakeEngine, name: str, dtype: str, setting: str
) -> None:
    wanted = expected(references.get(name, 0, dtype), PROMPTS)
    options = caching_prefixes(name, TIGHT_SETTINGS[setting])
    llm = make_engine(name, dtype=dtype, max_model_len=MAX_MODEL_LEN, **options)
    found = run_greedy(llm, PROMPTS, NUM_TOKENS)
    assert mismatches(found, wanted, TIE_GAPS[dtype]) == []
    assert llm.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for n, name in enumerate(ARCHITECTURES if EVERY else (*PLAIN, *HYBRIDS))
        for dtype in (TIE_GAPS if EVERY else (dtype_of(n),))
    ],
)
def test_alone(references: ReferenceStore, make_engine: MakeEngine, name: str, dtype: str) -> None:
    prompts = PROMPTS if EVERY else PROMPTS[::3]  # of 1, 16, 32 and 300 tokens
    wanted = expected(references.get(name, 0, dtype), prompts)
    llm = make_engine(name, dtype=dtype, max_model_len=MAX_MODEL_LEN)
    found = [run_greedy(llm, [prompt], NUM_TOKENS)[0] for prompt in prompts]
    assert mismatches(found, wanted, TIE_GAPS[dtype]) == []


@models_with("dtype, seed", [("float32", 1), ("float64", 2)])
def test_other_seeds(
    references: ReferenceStore, make_engine: MakeEngine, name: str, dtype: str, seed: int
) -> None:
    """Other weights and other prompts."""
    lengths = (1, 5, 16, 48, 77, 211, 300) if EVERY else (1, 16, 77, 300)
    prompts = [make_prompt(length, seed) for length in lengths]
    wanted = expected(references.get(name, seed, dtype), prompts, 16)
    llm = make_engine(
        name, seed=seed, dtype=dtype, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=128
    )
    assert mismatches(run_greedy(llm, prompts, 16), wanted, TIE_GAPS[dtype]) == []


def drive(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    arrivals: Callable[[int], int],
) -> list[list[int]]:
    """Step by hand; before each step `arrivals(step)` further requests come in."""
    answers: dict[str, list[int]] = {}
    num_added = num_steps = 0
    while num_added < len(prompts) or llm.engine.has_work:
        for _ in range(min(arrivals(num_steps), len(prompts) - num_added)):
            prompt = prompts[num_added]
            llm.engine.add_request(str(num_added), prompt, greedy_params(max_tokens))
            num_added += 1
        num_steps += 1
        if llm.engine.has_work:
            for output in llm.engine.step():
                answers[output.request_id] = output.outputs[0].token_ids
    return [answers[str(index)] for index in range(len(prompts))]


@models_with("dtype, budget", [("float64", 24), ("float32", 2048)])
def test_arrivals_while_others_decode(
    references: ReferenceStore, make_engine: MakeEngine, name: str, dtype: str, budget: int
) -> None:
    prompts = [PROMPTS[index] for index in (4, 9, 0, 7, 8, 2, 1, 6, 3, 5)]
    wanted = expected(references.get(name, 0, dtype), prompts)
    llm = make_engine(name, dtype=dtype, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=budget)
    found = drive(llm, prompts, NUM_TOKENS, lambda step: 1 if step % 3 == 0 else 0)
    assert mismatches(found, wanted, TIE_GAPS[dtype]) == []


@pytest.mark.parametrize("draw", range(24 if EVERY else 10))
def test_random_schedules(references: ReferenceStore, make_engine: MakeEngine, draw: int) -> None:
    """Any model, sizes and order of arrival."""
    rng = random.Random(draw)
    name = rng.choice(list(ARCHITECTURES))
    block_size = rng.choice([1, 2, 4, 8, 16, 32])
    num_seqs = rng.choice([1, 2, 5, 16])
    options: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "block_size": block_size,
        "num_kv_blocks": rng.choice([1, 2, 4]) * MAX_MODEL_LEN // block_size + 1,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": rng.randint(num_seqs, 150),
        "enable_prefix_caching": rng.random() < 0.7,
    }
    llm = make_engine(name, **caching_prefixes(name, options))
    prompts = rng.sample(PROMPTS, len(PROMPTS)) + rng.sample(PROMPTS, 3)
    num_tokens = rng.randint(1, NUM_TOKENS)
    wanted = expected(references.get(name), prompts, num_tokens)
    found = drive(llm, prompts, num_tokens, lambda step: rng.choice([0, 0, 1, 3]) + (step == 0))
    assert mismatches(found, wanted, TIE_GAPS["float32"]) == []


@pytest.mark.parametrize("name", HYBRIDS)
def test_rejected_drafts_leave_no_trace_in_states(
    references: ReferenceStore, make_engine: MakeEngine, name: str
) -> None:
    """n-grams guess that a text goes on as it did before; some of the guesses are right."""
    stems = [make_prompt(length, seed=9) for length in (1, 5, 16, 40)]
    model = references.get(name, 0, "float64")
    prompts = [[*stem, *model.greedy(stem, 8).token_ids, *stem] for stem in stems]
    wanted = expected(model, prompts)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    options = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64}
    llm = make_engine(name, dtype="float64", speculative_config=drafts, **options)
    found = run_greedy(llm, prompts, NUM_TOKENS)
    assert mismatches(found, wanted, TIE_GAPS["float64"]) == []
    counts = llm.metrics()
    accepted = counts["spec_decode_num_accepted_tokens"]
    assert 0 < accepted < counts["spec_decode_num_draft_tokens"]


def test_abort_leaves_others_alone(references: ReferenceStore, make_engine: MakeEngine) -> None:
    wanted = expected(references.get("mistral"), PROMPTS)
    llm = make_engine("mistral", max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64)
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(index), prompt, greedy_params(NUM_TOKENS))
    answers: dict[int, list[int]] = {}
    for step in range(1, 500):
        if not llm.engine.has_work:
            break
        for output in llm.engine.step():
            answers[int(output.request_id)] = output.outputs[0].token_ids
        if step in (3, 5, 7):
            llm.engine.abort_request(str(step))
    kept = [index for index in range(len(PROMPTS)) if index not in (3, 5, 7)]
    found, due = [answers[index] for index in kept], [wanted[index] for index in kept]
    assert mismatches(found, due, TIE_GAPS["float32"]) == []
    assert all(len(answers.get(index, [])) < NUM_TOKENS for index in (3, 5, 7))


@models_with("dtype", list(TIE_GAPS))
def test_length_limit_of_the_model(
    references: ReferenceStore, make_engine: MakeEngine, name: str, dtype: str
) -> None:
    """With no max_tokens an answer ends where the sequence reaches max_model_len."""
    limit = 310
    prompts = [make_prompt(length) for length in (limit - 1, limit - 2, 300)]
    model = references.get(name, 0, dtype)
    wanted = [model.greedy(prompt, limit - len(prompt)) for prompt in prompts]
    llm = make_engine(name, dtype=dtype, max_model_len=limit)
    outputs = llm.generate(prompts, greedy_params(None), use_tqdm=False)
    assert mismatches(answer_ids(outputs), wanted, TIE_GAPS[dtype]) == []
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3


def test_full_context_of_the_model(references: ReferenceStore, make_engine: MakeEngine) -> None:
    """Up to the last of the model's positions, by default."""
    for name in ("llama-yarn", "mistral"):
        wanted = references.get(name).greedy(make_prompt(500), 12)
        llm = make_engine(name, block_size=32)
        output = llm.generate([make_prompt(500)], greedy_params(None), use_tqdm=False)[0]
        assert mismatches(answer_ids([output]), [wanted], TIE_GAPS["float32"]) == []
        assert output.outputs[0].finish_reason == "length"


@models_with("form", ["one", "list"])
def test_end_of_text_stops(
    checkpoints: CheckpointStore,
    references: ReferenceStore,
    make_engine: MakeEngine,
    name: str,
    form: str,
) -> None:
    """The checkpoint's end-of-text tokens stop an answer where transformers' generate stops."""
    prompts = [PROMPTS[index] for index in (2, 5, 8)]
    free = expected(references.get(name), prompts)
    eos = free[1].token_ids[9]
    folder = copy_with_eos(
        checkpoints.get(name), checkpoints.scratch(name), eos if form == "one" else [3, eos]
    )
    model = HuggingFace(folder, "float32")
    wanted = [model.generate(prompt, NUM_TOKENS) for prompt in prompts]
    llm = make_engine(folder, max_model_len=MAX_MODEL_LEN)
    outputs = llm.generate(prompts, greedy_params(NUM_TOKENS, ignore_eos=False), use_tqdm=False)
    assert answer_ids(outputs) == wanted
    assert len(wanted[1]) <= 10
    for output, ids in zip(outputs, wanted, strict=True):
        stopped = ids[-1] in (eos, 3) if form == "list" else ids[-1] == eos
        assert output.outputs[0].finish_reason == ("stop" if stopped else "length")
        assert output.outputs[0].stop_reason == (ids[-1] if stopped else None)
    ignored = run_greedy(llm, prompts, NUM_TOKENS)
    assert mismatches(ignored, free, TIE_GAPS["float32"]) == []
