"""Answers on cached prefixes equal transformers': KV blocks, and in hybrids snapshots of states."""

from collections.abc import Sequence
from typing import Any

import pytest

from support.checkpoints import HYBRIDS, PLAIN, RECURRENT
from support.crossings import EVERY, caching_prefixes
from support.engines import MakeEngine
from support.huggingface import (
    TIE_GAPS,
    Reference,
    ReferenceStore,
    greedy_params,
    make_prompt,
    mismatches,
    run_greedy,
)

MAX_MODEL_LEN = 352
CACHE_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks-of-37": {"max_num_batched_tokens": 37},
    "blocks-of-4": {"block_size": 4},
    "blocks-of-32": {"block_size": 32},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
HITS, RESTORED = COUNTS = ("prefix_cache_hit_tokens", "state_cache_snapshots_restored")
MODELS = (*PLAIN, *(RECURRENT if EVERY else HYBRIDS))


def expected(
    references: ReferenceStore, name: str, prompts: Sequence[Sequence[int]], dtype: str = "float32"
) -> list[Reference]:
    model = references.get(name, 0, dtype)
    return [model.greedy(prompt, 16) for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting)
        for n, name in enumerate(MODELS)
        for s, setting in enumerate(CACHE_SETTINGS)
        if EVERY or (s + n) % len(CACHE_SETTINGS) == 0
    ],
)
def test_shared_prefixes_twice(
    references: ReferenceStore, make_engine: MakeEngine, name: str, setting: str
) -> None:
    """What is cached serves others' prompts, a whole prompt of full blocks, and a second round."""
    stem = make_prompt(192, seed=5)
    tails = [make_prompt(length, seed=6) for length in (1, 7, 16, 40)]
    prompts = [stem, *(stem + tail for tail in tails), stem[:33]]
    wanted = expected(references, name, prompts)
    options = caching_prefixes(name, CACHE_SETTINGS[setting])
    llm = make_engine(name, max_model_len=MAX_MODEL_LEN, **options)
    first = run_greedy(llm, prompts, 16)
    at_first = llm.metrics()
    second = run_greedy(llm, prompts, 16)
    assert mismatches(first + second, wanted + wanted, TIE_GAPS["float32"]) == []
    grown = {key: llm.metrics()[key] - count for key, count in at_first.items() if key in COUNTS}
    # All but each prompt's last block at least.
    assert grown[HITS] >= sum(len(prompt) - 32 for prompt in prompts)
    assert grown[RESTORED] == (len(prompts) if name in RECURRENT else 0)


@pytest.mark.parametrize("name", ["qwen3", *HYBRIDS])
def test_cached_answer_is_continued(
    references: ReferenceStore, make_engine: MakeEngine, name: str
) -> None:
    """A follow-up prompt, the first prompt with its answer, finds the blocks of both. A hybrid
    saves its state at the end of an answer if that is the end of a block."""
    prompt, count = make_prompt(150), 11 if name in RECURRENT else 24
    wanted = references.get(name).greedy(prompt, 32)
    llm = make_engine(name, **caching_prefixes(name, {"max_model_len": MAX_MODEL_LEN}))
    first = run_greedy(llm, [prompt], count)[0]
    assert first == wanted.token_ids[:count]
    output = llm.generate([[*prompt, *first]], greedy_params(32 - count), use_tqdm=False)[0]
    assert output.outputs[0].token_ids == wanted.token_ids[count:]
    # 150 prompt tokens and those of the answer, of which the last was never computed.
    assert output.num_cached_tokens == 160


@pytest.mark.parametrize("drafts", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_state_is_restored_where_prompts_part(
    references: ReferenceStore, make_engine: MakeEngine, name: str, drafts: dict[str, Any] | None
) -> None:
    """The second user of a shared prefix saves its state, with the default limit; the third one
    starts from it, and so do two at once. Short ends, for a state forgets."""
    stem = make_prompt(192, seed=5)
    prompts = [stem + make_prompt(length, seed=7) for length in (40, 41, 1, 2, 3)]
    wanted = expected(references, name, prompts, "float64")
    options = caching_prefixes(name, {"speculative_config": drafts, "dtype": "float64"})
    llm = make_engine(name, max_model_len=MAX_MODEL_LEN, **options)
    cached, found = [], []
    for some in (prompts[:1], prompts[1:2], prompts[2:3], prompts[3:]):
        for output in llm.generate(some, greedy_params(16), use_tqdm=False):
            cached.append(output.num_cached_tokens)
            found.append(list(output.outputs[0].token_ids))
    assert mismatches(found, wanted, TIE_GAPS["float64"]) == []
    assert cached == [0, 0, 192, 192, 192]
    assert llm.metrics()[RESTORED] == 3


# By the limit that is lowered, as if prompts were long: how much of a prompt of 150 tokens the next
# ones share, the tokens after that, and how many are skipped.
LOWERED = {
    "_interval": (32, [(81, 1), (82, 3)], [0, 80, 80]),  # chunks end after 40, 80 and 120 tokens
    "_least_shared": (16, [(100, 20), (97, 1), (98, 3)], [0, 0, 96, 96]),
}


@pytest.mark.parametrize("limit", LOWERED)
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_are_saved_far_before_the_end_of_a_prompt(
    references: ReferenceStore, make_engine: MakeEngine, name: str, limit: str
) -> None:
    """Where chunks end, or where a shared prefix ends."""
    value, parts, skipped = LOWERED[limit]
    stem = make_prompt(150, seed=8)
    prompts = [stem, *(stem[:shared] + make_prompt(own, seed=9) for shared, own in parts)]
    wanted = expected(references, name, prompts, "float64")
    options = caching_prefixes(name, {"block_size": 8, "max_num_batched_tokens": 40})
    llm = make_engine(name, dtype="float64", max_model_len=MAX_MODEL_LEN, **options)
    assert hasattr(llm.engine.scheduler, limit)
    setattr(llm.engine.scheduler, limit, value)
    cached, found = [], []
    for prompt in prompts:
        (output,) = llm.generate([prompt], greedy_params(16), use_tqdm=False)
        cached.append(output.num_cached_tokens)
        found.append(list(output.outputs[0].token_ids))
    assert mismatches(found, wanted, TIE_GAPS["float64"]) == []
    assert cached == skipped
    assert llm.metrics()[RESTORED] == sum(map(bool, cached))
