"""Seeds, distributions and log-probabilities through the whole engine, on a tiny float64 model."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from stoop import SamplingParams
from support.engines import generate_ids
from support.tiny_llama import VOCAB, hf_logits, make_tiny_llm

HF_ERROR = 1e-5  # transformers rotates in float32, in float64 models too
PROMPTS = [
    [5, 6, 7],
    [11, 12, 13, 14, 15, 16, 17, 18, 19],
    [5, 6, 7, 8, 9, 10, 11, 12],
    [99],
    list(range(30, 52)),
]
SEEDED = [
    SamplingParams(seed=1, max_tokens=24),
    SamplingParams(seed=2, max_tokens=24, temperature=0.7, top_k=20),
    SamplingParams(seed=3, max_tokens=24, top_p=0.9, presence_penalty=0.5),
    SamplingParams(seed=-4, max_tokens=24, min_p=0.01, repetition_penalty=1.2),
    SamplingParams(seed=2**62, max_tokens=24, logit_bias={5: 2.0}),
]


@pytest.fixture(scope="module")
def roomy() -> Any:
    return make_tiny_llm(max_num_seqs=8)


@pytest.fixture(scope="module")
def alone(roomy: Any) -> list[list[int]]:
    """Each request by itself: what every other arrangement must repeat."""
    return [
        generate_ids(roomy, [prompt], [params])[0]
        for prompt, params in zip(PROMPTS, SEEDED, strict=True)
    ]


def test_same_seed_same_tokens_again(roomy: Any, alone: list[list[int]]) -> None:
    assert generate_ids(roomy, PROMPTS[:1], SEEDED[:1]) == alone[:1]


def test_seeded_answers_do_not_depend_on_the_batch(roomy: Any, alone: list[list[int]]) -> None:
    assert generate_ids(roomy, PROMPTS, SEEDED) == alone
    assert generate_ids(roomy, PROMPTS[::-1], SEEDED[::-1]) == alone[::-1]
    others = [SamplingParams(temperature=0.0), SamplingParams(max_tokens=9, top_k=2, logprobs=2)]
    mixed = generate_ids(roomy, [*PROMPTS, [1, 2], [3]], [*SEEDED, *others])
    assert mixed[:5] == alone


def test_seeded_answers_do_not_depend_on_chunks(alone: list[list[int]]) -> None:
    llm = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=5)
    assert generate_ids(llm, PROMPTS, SEEDED) == alone
    assert generate_ids(llm, PROMPTS, SEEDED) == alone  # now from the prefix cache
    assert llm.metrics()["prefix_cache_hit_tokens"] > 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_seeded_answers_survive_preemption(alone: list[list[int]], prefix_caching: bool) -> None:
    llm = make_tiny_llm(max_num_seqs=5, num_kv_blocks=18, enable_prefix_caching=prefix_caching)
    assert generate_ids(llm, PROMPTS, SEEDED) == alone
    assert llm.metrics()["num_preemptions"] > 0


def test_several_answers_differ_and_the_first_is_the_single_one(roomy: Any) -> None:
    params = SamplingParams(seed=7, max_tokens=12)
    single = generate_ids(roomy, [[5, 6, 7]], params)[0]
    (output,) = roomy.generate([[5, 6, 7]], params.replace(n=6), use_tqdm=False)
    answers = [tuple(answer.token_ids) for answer in output.outputs]
    assert [answer.index for answer in output.outputs] == list(range(6))
    assert list(answers[0]) == single
    assert len(set(answers)) == 6


def test_different_seeds_differ(roomy: Any) -> None:
    params = [SamplingParams(seed=seed, max_tokens=12) for seed in range(8)]
    assert len(set(map(tuple, generate_ids(roomy, [[5, 6, 7]] * 8, params)))) == 8


def test_unseeded_requests_differ_from_each_other(roomy: Any) -> None:
    found = generate_ids(roomy, [[5, 6, 7]] * 4, SamplingParams(max_tokens=12))
    assert len(set(map(tuple, found))) == 4


def test_greedy_rows_among_noisy_ones_follow_the_argmax(roomy: Any) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=8), *SEEDED[1:]]
    found = generate_ids(roomy, PROMPTS, params)[0]
    tokens = list(PROMPTS[0])
    for token in found:
        assert token == int(hf_logits(tokens)[-1].argmax())
        tokens.append(token)


def chi_squared(tokens: list[int], probs: np.ndarray) -> float:
    counts, expected = np.bincount(tokens, minlength=VOCAB), probs * len(tokens)
    common = expected >= 5
    found = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    return float(stats.chisquare(found, wanted).pvalue)


FLAT = 0.08  # a model whose next token is far from certain


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_generated_tokens_follow_the_models_own_distribution(temperature: float) -> None:
    """Many seeds, first and second token, against the softmax of another implementation."""
    llm = make_tiny_llm(FLAT, max_num_seqs=128)
    prompt = [3, 1, 4, 1, 5, 9]
    params = [
        SamplingParams(n=128, seed=1000 + i, temperature=temperature, max_tokens=2)
        for i in range(24)
    ]
    outputs = llm.generate([prompt] * 24, params, use_tqdm=False)
    answers = [answer.token_ids for output in outputs for answer in output.outputs]
    logits = hf_logits(prompt, FLAT)[-1] / temperature
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    assert chi_squared([ids[0] for ids in answers], probs) > 1e-4
    # The second token, summed over the first: each first token has its own distribution.
    second = np.zeros(VOCAB)
    for first in {ids[0] for ids in answers}:
        row = hf_logits([*prompt, first], FLAT)[-1] / temperature
        weights = np.exp(row - row.max())
        second += weights / weights.sum() * sum(ids[0] == first for ids in answers)
    assert chi_squared([ids[1] for ids in answers], second / len(answers)) > 1e-4


@pytest.mark.parametrize("asked", [0, 3, 20])
def test_logprobs_are_those_of_the_raw_logits(roomy: Any, asked: int) -> None:
    params = SamplingParams(seed=5, max_tokens=6, temperature=1.5, top_k=50, logprobs=asked)
    other = SamplingParams(seed=6, max_tokens=6, logprobs=7)
    output, _ = roomy.generate([PROMPTS[0], PROMPTS[1]], [params, other], use_tqdm=False)
    (answer,) = output.outputs
    logits = hf_logits(PROMPTS[0] + answer.token_ids)
    total = 0.0
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) == 6
    for place, (token, entries) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        row = logits[len(PROMPTS[0]) - 1 + place]
        exact = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = np.argsort(-exact)[:asked].tolist()
        assert set(entries) == {token, *best}
        for entry, logprob in entries.items():
            assert logprob.logprob == pytest.approx(exact[entry], abs=HF_ERROR)
            assert logprob.rank == 1 + int((exact > exact[entry]).sum())
        total += exact[token]
    assert answer.cumulative_logprob == pytest.approx(total, abs=10 * HF_ERROR)


@pytest.mark.parametrize("budget", [None, 5])
@pytest.mark.parametrize("asked", [0, 2, -1])
def test_prompt_logprobs_are_those_of_the_raw_logits(asked: int, budget: int | None) -> None:
    llm = make_tiny_llm(max_num_seqs=4, max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=asked)
    prompt = PROMPTS[1]
    for _ in range(2):  # the second time the prefix is known, and still scored
        output, _ = llm.generate([prompt, [1, 2, 3]], [params, SamplingParams()], use_tqdm=False)
        scores = output.prompt_logprobs
        assert scores is not None and len(scores) == len(prompt) and scores[0] is None
        logits = hf_logits(prompt)
        for place in range(1, len(prompt)):
            row = logits[place - 1]
            exact = row - row.max() - np.log(np.exp(row - row.max()).sum())
            best = np.argsort(-exact)[: VOCAB if asked == -1 else asked].tolist()
            entries = scores[place]
            assert entries is not None and set(entries) == {prompt[place], *best}
            for entry, logprob in entries.items():
                assert logprob.logprob == pytest.approx(exact[entry], abs=HF_ERROR)
                assert logprob.rank == 1 + int((exact > exact[entry]).sum())
