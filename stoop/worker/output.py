"""From device tensors to a `StepResult`."""

from torch import Tensor

from stoop.core.step import RowResult, StepPlan, StepResult, TokenScores
from stoop.ops.sampling import score
from stoop.sampling.sampler import Sampled


class PromptScores:
    """Scores of successive prompt tokens, brought to the host piece by piece."""

    def __init__(self) -> None:
        self.rows: list[TokenScores] = []

    def add(self, logits: Tensor, targets: Tensor, num_best: int) -> None:
        """logits: [n, vocab_size], targets: [n] int64"""
        ids, logprobs, ranks = (t.tolist() for t in score(logits, targets, num_best))
        self.rows += [TokenScores(*row) for row in zip(ids, logprobs, ranks, strict=True)]


def collect(plan: StepPlan, sampled: Sampled, prompt_scores: dict[int, PromptScores]) -> StepResult:
    """Read a step's outcome; this is where the host waits for the device."""
    token_ids = sampled.token_ids.tolist()
    scores = _scores(sampled)
    rows = []
    for index, row in enumerate(plan.rows):
        asked = row.rules.params.logprobs
        rows.append(
            RowResult(
                request_id=row.request_id,
                epoch=row.epoch,
                token_ids=[token_ids[index]] if row.samples else [],
                scores=[_cut(scores[index], asked)] if row.samples and asked is not None else [],
                prompt_scores=prompt_scores[index].rows if index in prompt_scores else [],
                prompt_scores_start=row.num_computed + 1,
            )
        )
    return StepResult(plan.index, rows)


def _scores(sampled: Sampled) -> list[TokenScores]:
    if sampled.score_ids is None or sampled.scores is None or sampled.ranks is None:
        return []
    columns = (sampled.score_ids.tolist(), sampled.scores.tolist(), sampled.ranks.tolist())
    return [TokenScores(*row) for row in zip(*columns, strict=True)]


def _cut(scores: TokenScores, num_best: int) -> TokenScores:
    """What this row asked for; the batch was scored for the row that asked for most."""
    return TokenScores(
        scores.token_ids[: 1 + num_best], scores.logprobs[: 1 + num_best], scores.rank
    )
