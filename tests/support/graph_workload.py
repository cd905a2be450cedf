"""One workload for every mode: many lengths, chunks, preemption, all kinds of sampling."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

from stoop import LLM, SamplingParams
from support.engines import make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True, logprobs=0)
NOISE = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=0)
FULL = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=40,
    seed=4,
    max_tokens=29,
    ignore_eos=True,
    frequency_penalty=0.6,
    repetition_penalty=1.2,
    logit_bias={3: 2.0},
    logprobs=0,
)

SETTINGS: dict[str, Any] = {
    "max_model_len": 160,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "block_size": 8,
    "num_kv_blocks": 22,  # too few for all: some are preempted
    "capture_sizes": "1,2,4,6,16,48",
}
LENGTHS = (1, 7, 8, 9, 100, 33, 60, 16)


@dataclass(frozen=True)
class Answers:
    token_ids: list[list[int]]
    logprobs: list[list[float]]


make_graph_llm = partial(make_llm, **SETTINGS)


def prompts(vocab_size: int = 128) -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


def run(llm: LLM) -> Answers:
    """A long prompt, then small batches; greedy, sampled and mixed."""
    outputs = []
    every = prompts()
    for params in (GREEDY, [GREEDY, NOISE, FULL, GREEDY, NOISE, FULL, GREEDY, NOISE]):
        outputs += llm.generate(every, params)
    outputs += llm.generate(every[:2], NOISE)
    answers = [output.outputs[0] for output in outputs]
    return Answers(
        [list(answer.token_ids) for answer in answers],
        [
            [entry[token].logprob for token, entry in zip(a.token_ids, a.logprobs, strict=True)]
            for a in answers
            if a.logprobs is not None
        ],
    )
