"""From device tensors to a `StepResult`.

A step's verdict is copied to the host behind the step, and read when it has landed: the host may
launch the next step before that.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.core.step import PlannedRow, RowResult, StepResult, TokenScores
from stoop.models.base import Model
from stoop.ops.sampling import score
from stoop.sampling.verifier import Verdict

# Rows of logits made at once when a whole prompt is scored.
PROMPT_SCORE_ROWS = 128


class ScoreReader:
    """Log-probabilities, for the rows that asked, from the hidden states of the step.

    They are made here again from hidden states, outside the phases, so that no graph holds them.
    """

    def __init__(self, model: Model, hidden: Tensor, history: Tensor) -> None:
        self.model = model
        self.hidden = hidden  # [max_tokens, hidden_size]
        self.history = history  # [slots + 1, max_model_len]: tokens by slot

    def sampled(self, batch: InputBatch, tokens: list[list[int]]) -> dict[int, list[TokenScores]]:
        """By place of the row, for those that asked; as rich as the one that asked for most.

        tokens: by row, as many as it yields
        """
        asked = {
            place: row.rules.params.logprobs
            for place, row in enumerate(batch.plan_rows)
            if tokens[place] and row.rules.params.logprobs is not None
        }
        if not asked:
            return {}
        # The token behind a row's newest one is scored there, the next ones behind its drafts.
        first = batch.last_token_indices.tolist()
        where = [first[place] + j for place in asked for j in range(len(tokens[place]))]
        chosen = [token for place in asked for token in tokens[place]]
        scores = iter(self._score(self._at(where), self._ids(chosen), max(asked.values())))
        return {place: [next(scores) for _ in tokens[place]] for place in asked}

    def _at(self, where: list[int]) -> Tensor:
        return self.hidden[torch.tensor(where, device=self.hidden.device)]

    def _ids(self, token_ids: list[int]) -> Tensor:
        return torch.tensor(token_ids, device=self.hidden.device)

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


@dataclass(frozen=True)
class StepOutput:
    """A step's verdict on its way to the host, while later steps write over the device's."""

    host: Verdict
    landed: torch.cuda.Event | None  # None: it is there
    ring: "OutputRing"

    def wait(self) -> None:
        """This is where the loop waits for the device. (Scores are waited for apart, and a backend
        that plans on the host waits for lengths.)"""
        if self.landed is not None:
            started = time.perf_counter()
            self.landed.synchronize()
            self.ring.waited += time.perf_counter() - started

    def release(self) -> None:
        """It has been read: the next may have its place."""
        self.ring.free.append(self)


class OutputRing:
    """Pinned places for as many outputs as may be under way.

    One whose launch failed, or whose reading did, never comes back: another takes its place, since
    those of the steps around it are still to be read.
    """

    def __init__(self, verdict: Verdict, size: int) -> None:
        self.verdict = verdict
        self.waited = 0.0  # seconds that the host has waited for outputs
        self.free = [self._make() for _ in range(size)]

    def _make(self) -> StepOutput:
        packed, max_reqs = self.verdict.packed, self.verdict.num_tokens.shape[0]
        cuda = packed.device.type == "cuda"
        host = torch.zeros(packed.shape, dtype=packed.dtype, pin_memory=cuda)
        return StepOutput(Verdict.of(host, max_reqs), torch.cuda.Event() if cuda else None, self)

    def send(self) -> StepOutput:
        """Start the copy of what the step that was launched last will have found."""
        output = self.free.pop() if self.free else self._make()
        output.host.packed.copy_(self.verdict.packed, non_blocking=True)
        if output.landed is not None:
            output.landed.record()
        return output


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device has been given. `result` may be asked for once, in order."""

    index: int
    batch: InputBatch
    output: StepOutput
    reader: ScoreReader
    wants_scores: bool  # hidden states must stay as they are until the result is read

    def result(self) -> StepResult:
        self.output.wait()
        batch, host = self.batch, self.output.host
        counts = host.num_tokens[: batch.num_reqs].tolist()
        token_ids = host.token_ids[: batch.num_reqs].tolist()
        num_drafts = host.num_drafts[: batch.num_reqs].tolist()
        self.output.release()
        found = zip(batch.plan_rows, token_ids, counts, num_drafts, strict=True)
        rows = [
            RowResult(row.request_id, row.epoch, tokens[:count], drafts)
            for row, tokens, count, drafts in found
        ]
        if self.wants_scores:
            self._add_scores(rows)
        return StepResult(self.index, rows)

    def _add_scores(self, rows: list[RowResult]) -> None:
        """Of sampled tokens and of prompts."""
        planned = self.batch.plan_rows
        sampled = self.reader.sampled(self.batch, [row.token_ids for row in rows])
        for place, found in sampled.items():
            asked = planned[place].rules.params.logprobs or 0
            rows[place].scores = [_cut(each, asked) for each in found]
        first_token = 0
        for row, plan in zip(rows, planned, strict=True):
            row.prompt_scores = self.reader.prompt(plan, first_token)
            row.prompt_scores_start = plan.num_computed + 1
            first_token += plan.num_tokens


def _cut(scores: TokenScores, num_best: int) -> TokenScores:
    """What this row asked for; the batch was scored for the row that asked for most."""
    return TokenScores(
        scores.token_ids[: 1 + num_best], scores.logprobs[: 1 + num_best], scores.rank
    )
