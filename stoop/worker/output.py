"""From device tensors to a `StepResult`."""

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.core.step import PlannedRow, RowResult, StepResult, TokenScores
from stoop.models.llama import LlamaModel
from stoop.ops.sampling import score

# Rows of logits made at once when a whole prompt is scored.
PROMPT_SCORE_ROWS = 128


class ScoreReader:
    """Log-probabilities, for the rows that asked, from the hidden states of the step.

    They are made here again from hidden states, outside the phases, so that no graph holds them.
    """

    def __init__(self, model: LlamaModel, hidden: Tensor, history: Tensor) -> None:
        self.model = model
        self.hidden = hidden  # [max_tokens, hidden_size]
        self.history = history  # [slots + 1, max_model_len]: tokens by slot

    def sampled(self, batch: InputBatch, token_ids: Tensor) -> dict[int, TokenScores]:
        """By place of the row, for those that asked; as rich as the one that asked for most."""
        asked = {
            place: row.rules.params.logprobs
            for place, row in enumerate(batch.plan_rows)
            if row.samples and row.rules.params.logprobs is not None
        }
        if not asked:
            return {}
        places = torch.tensor(list(asked), device=token_ids.device)
        hidden = self.hidden[batch.last_token_indices[places]]
        scores = self._score(hidden, token_ids[places], max(asked.values()))
        return dict(zip(asked, scores, strict=True))

    def prompt(self, row: PlannedRow, first_token: int) -> list[TokenScores]:
        """Scores of the prompt tokens that a chunk predicts: position p scores token p + 1.

        first_token: the row's first token in the batch
        """
        asked = row.rules.params.prompt_logprobs
        count = min(row.num_tokens, row.num_prompt_tokens - 1 - row.num_computed)
        if asked is None or count <= 0:
            return []
        num_best = self.model.spec.vocab_size if asked == -1 else asked
        known = self.history[row.slot, row.num_computed + 1 :]
        targets = known[:count].long()
        scores: list[TokenScores] = []
        for start in range(0, count, PROMPT_SCORE_ROWS):
            stop = min(count, start + PROMPT_SCORE_ROWS)
            hidden = self.hidden[first_token + start : first_token + stop]
            scores += self._score(hidden, targets[start:stop], num_best)
        return scores

    def _score(self, hidden: Tensor, chosen: Tensor, num_best: int) -> list[TokenScores]:
        columns = score(self.model.logits(hidden), chosen, num_best)
        return [TokenScores(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def collect(index: int, batch: InputBatch, sampled: Tensor, reader: ScoreReader) -> StepResult:
    """Read a step's outcome; this is where the host waits for the device.

    sampled: [max_reqs] int64
    """
    chosen = sampled[: batch.num_reqs]
    token_ids = chosen.tolist()
    scores = reader.sampled(batch, chosen)
    rows = []
    first_token = 0
    for place, row in enumerate(batch.plan_rows):
        asked = row.rules.params.logprobs or 0
        rows.append(
            RowResult(
                request_id=row.request_id,
                epoch=row.epoch,
                token_ids=[token_ids[place]] if row.samples else [],
                scores=[_cut(scores[place], asked)] if place in scores else [],
                prompt_scores=reader.prompt(row, first_token),
                prompt_scores_start=row.num_computed + 1,
            )
        )
        first_token += row.num_tokens
    return StepResult(index, rows)


def _cut(scores: TokenScores, num_best: int) -> TokenScores:
    """What this row asked for; the batch was scored for the row that asked for most."""
    return TokenScores(
        scores.token_ids[: 1 + num_best], scores.logprobs[: 1 + num_best], scores.rank
    )
