"""One workload for every mode: many lengths, chunks, preemption, all kinds of sampling."""

from dataclasses import dataclass
from functools import partial

from stoop import LLM
from stoop.check.workloads import FULL, NOISE, answer_batches, random_prompts
from stoop.check.workloads import LONG as GREEDY
from stoop.check.workloads import TARGET_LENGTHS as LENGTHS
from stoop.check.workloads import TARGET_SETTINGS as SETTINGS
from support.engines import make_llm

__all__ = ["FULL", "GREEDY", "NOISE", "SETTINGS", "Answers", "make_graph_llm", "prompts", "run"]


@dataclass(frozen=True)
class Answers:
    token_ids: list[list[int]]
    logprobs: list[list[float]]


make_graph_llm = partial(make_llm, **SETTINGS)


def prompts(vocab_size: int = 128) -> list[list[int]]:
    return random_prompts(LENGTHS, vocab_size)


def run(llm: LLM) -> Answers:
    """A long prompt, then small batches; greedy, sampled and mixed."""
    answers = answer_batches(llm)
    return Answers(
        [list(answer.token_ids) for answer in answers],
        [
            [entry[token].logprob for token, entry in zip(a.token_ids, a.logprobs, strict=True)]
            for a in answers
            if a.logprobs is not None
        ],
    )
