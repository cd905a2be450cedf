"""Compares answers with and without a drafter.

In exact arithmetic, greedy answers are equal token for token. In lower precision, the last bits of
a logit depend on the batch, so a near tie may go the other way. The gap, the lead of the best token
over the second best, tells such a case from a bug. Both engines measure the gap where their answers
still agree, and the largest difference between the two is the noise. A divergence is explained if
its gap is within that noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoop.core.outputs import CompletionOutput
from stoop.core.prompts import Prompt
from stoop.core.report import Report
from stoop.core.sampling_params import SamplingParams
from stoop.llm import LLM


@dataclass(frozen=True)
class Divergence:
    """The first difference between two answers."""

    prompt: int  # the prompt's index
    position: int  # of the first token that differs
    gap: float  # of the plain answer there, in log probability


@dataclass(frozen=True)
class AnswerCheck:
    """The result of comparing all answers."""

    num_answers: int  # each prompt counts twice: alone and in the batch
    num_tokens: int  # equal tokens, up to the first difference of each answer
    noise: float  # the largest difference between two measurements of one gap
    divergences: tuple[Divergence, ...]

    @property
    def unexplained(self) -> list[Divergence]:
        return [each for each in self.divergences if each.gap > self.noise]

    @property
    def num_equal(self) -> int:
        return self.num_answers - len(self.divergences)


def check_answers(
    model: str, options: dict[str, Any], prompts: Sequence[Prompt], max_tokens: int, report: Report
) -> AnswerCheck:
    """Answer each prompt alone with and without the drafter, then all as one batch with it."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)

    def ask(llm: LLM, stage: str, *batches: Sequence[Prompt]) -> list[CompletionOutput]:
        found: list[CompletionOutput] = []
        for done, batch in enumerate(batches):
            report(stage, done, len(batches))
            outputs = llm.generate(list(batch), params, use_tqdm=False)
            found += [output.outputs[0] for output in outputs]
        return found

    alone = [[prompt] for prompt in prompts]
    # One engine after another, since each may take most of the device's memory.
    undrafted = {**options, "speculative_config": None}
    plain = ask(LLM(model, report=report, **undrafted), "answering without drafts", *alone)
    drafted = ask(LLM(model, report=report, **options), "answering with drafts", *alone, prompts)
    return compare(plain * 2, drafted, len(prompts))


def compare(
    expected: Sequence[CompletionOutput], found: Sequence[CompletionOutput], num_prompts: int
) -> AnswerCheck:
    """Find divergences, and the noise where answers agree."""
    num_tokens, noise = 0, 0.0
    divergences = []
    for place, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        same = _common_prefix(ours.token_ids, theirs.token_ids)
        num_tokens += same
        for position in range(same):
            noise = max(noise, abs(_gap(ours, position) - _gap(theirs, position)))
        if ours.token_ids != theirs.token_ids:
            divergences.append(Divergence(place % num_prompts, same, _gap(ours, same)))
    return AnswerCheck(len(expected), num_tokens, noise, tuple(divergences))


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return min(len(ours), len(theirs))


def _gap(answer: CompletionOutput, position: int) -> float:
    """Return the lead of the best token; infinite where only this answer has ended."""
    assert answer.logprobs is not None
    if position >= len(answer.logprobs):
        return float("inf")
    best, second = sorted((e.logprob for e in answer.logprobs[position].values()), reverse=True)[:2]
    return best - second
