"""Turns a step's device tensors into a `StepResult`.

A step's verdict is copied to the host asynchronously after the step. The host may launch the next
step before it reads the copy.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.core.step import PlannedRow, RowResult, StepResult, TokenScores
from stoop.grammar.masks import GrammarMasks
from stoop.models.base import Model
from stoop.ops.sampling import score
from stoop.sampling.verifier import Verdict

# Rows of logits computed at a time when a whole prompt is scored.
PROMPT_SCORE_ROWS = 128


class ScoreReader:
    """Computes log probabilities for the rows that asked, from the hidden states of the step.

    The logits are recomputed here, outside the phases, so that no graph contains scoring.
    """

    def __init__(self, model: Model, hidden: Tensor, history: Tensor) -> None:
        self.model = model
        self.hidden = hidden  # [max_tokens, hidden_size]
        self.history = history  # [slots + 1, max_model_len]: tokens by slot

    def sampled(self, batch: InputBatch, tokens: list[list[int]]) -> dict[int, list[TokenScores]]:
        """Score sampled tokens by row index, for the rows that asked.

        All rows get as many top tokens as the largest request among them.
        tokens: the sampled tokens of each row
        """
        asked = {
            place: row.rules.params.logprobs
            for place, row in enumerate(batch.plan_rows)
            if tokens[place] and row.rules.params.logprobs is not None
        }
        if not asked:
            return {}
        # A row's newest token predicts the first sampled token, its drafts the following ones.
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
        """Score the prompt tokens that a chunk predicts: position p scores token p + 1.

        first_token: index of the row's first token in the batch
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
    """A host copy of a step's verdict; later steps overwrite the verdict on the device."""

    host: Verdict
    landed: torch.cuda.Event | None  # recorded after the copy; None on a CPU
    ring: "OutputRing"

    def wait(self) -> None:
        """Wait for the copy. This is where the engine loop waits for the device.

        Reading scores also waits, and so does an attention backend that plans on the host.
        """
        if self.landed is not None:
            started = time.perf_counter()
            self.landed.synchronize()
            self.ring.waited += time.perf_counter() - started

    def release(self) -> None:
        """Return the buffer to the ring after reading it."""
        self.ring.free.append(self)


class OutputRing:
    """Pinned host buffers for the outputs of all steps in flight.

    A buffer is lost if its launch or its reading fails. `send` then allocates a new one, since the
    other buffers may still be unread.
    """

    def __init__(self, verdict: Verdict, size: int) -> None:
        self.verdict = verdict
        self.waited = 0.0  # total seconds that the host waited for outputs
        self.free = [self._make() for _ in range(size)]

    def _make(self) -> StepOutput:
        packed, max_reqs = self.verdict.packed, self.verdict.num_tokens.shape[0]
        cuda = packed.device.type == "cuda"
        host = torch.zeros(packed.shape, dtype=packed.dtype, pin_memory=cuda)
        return StepOutput(Verdict.of(host, max_reqs), torch.cuda.Event() if cuda else None, self)

    def send(self) -> StepOutput:
        """Start copying the verdict of the step launched last."""
        output = self.free.pop() if self.free else self._make()
        output.host.packed.copy_(self.verdict.packed, non_blocking=True)
        if output.landed is not None:
            output.landed.record()
        return output


@dataclass(frozen=True)
class LaunchedStep:
    """A step in flight. Call `result` once, in launch order."""

    index: int
    batch: InputBatch
    output: StepOutput
    reader: ScoreReader
    has_scores: bool
    grammars: GrammarMasks | None = None  # if a row has one

    @property
    def wants_scores(self) -> bool:
        """Hidden states must stay as they are until the result is read, and masks of the next step
        depend on it."""
        return self.has_scores or self.grammars is not None

    def result(self) -> StepResult:
        self.output.wait()
        batch, host = self.batch, self.output.host
        counts = host.num_tokens[: batch.num_reqs].tolist()
        most, least = max(counts, default=0), min(counts, default=0)
        width = max(most, -1 - least)  # a count of -1 - n means: n tokens, and then none
        token_ids = host.token_ids[: batch.num_reqs, :width].tolist()
        num_drafts = host.num_drafts[: batch.num_reqs].tolist()
        self.output.release()
        of_rows = token_ids
        if least < width:
            of_rows = [tokens[:count] for tokens, count in zip(token_ids, counts, strict=True)]
        rows = [
            RowResult(row.request_id, row.epoch, tokens, drafts)
            for row, tokens, drafts in zip(batch.plan_rows, of_rows, num_drafts, strict=True)
        ]
        if least < 0:
            _mark_failed(rows, token_ids, counts)
        if self.grammars is not None:
            self.grammars.advance(batch.plan_rows, rows)
        if self.has_scores:
            self._add_scores(rows)
        return StepResult(self.index, rows)

    def _add_scores(self, rows: list[RowResult]) -> None:
        """Add the scores of sampled tokens and of prompts."""
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


def _mark_failed(rows: list[RowResult], token_ids: list[list[int]], counts: list[int]) -> None:
    for row, tokens, count in zip(rows, token_ids, counts, strict=True):
        if count < 0:
            row.token_ids, row.failed = tokens[: -1 - count], True


def _cut(scores: TokenScores, num_best: int) -> TokenScores:
    """Keep as many top tokens as this row asked for."""
    return TokenScores(
        scores.token_ids[: 1 + num_best], scores.logprobs[: 1 + num_best], scores.rank
    )
