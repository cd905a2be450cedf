"""Phase V: which drafts are accepted, and the token after them, by each request's own parameters.

The target's token is drawn at each position with the noise that plain decoding would use, and
drafts are accepted as long as they agree. So the same seed gives the same text with and without
speculation, whatever the drafts are. Only drafts that were drawn with their own noise
(`probabilistic`) take the ratio test, and a rejected one is replaced by a draw from the residual.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.config.schema import SpecConfig
from stoop.ops import verification as ops
from stoop.ops.sampling import greedy
from stoop.sampling.sampler import Positions, Sampler, SamplingNeeds


@dataclass(frozen=True)
class Verdict:
    """The tokens of a step, by row, in persistent buffers."""

    packed: Tensor  # [max_reqs * (K + 3)] int64: all fields, for one copy to the host
    token_ids: Tensor  # [max_reqs, K + 1] int64: tokens, then zeros
    # [max_reqs] int64: tokens of the row; 0 if it samples nothing; -1 - n if the target has no
    # token after n accepted drafts, because of NaN
    num_tokens: Tensor
    num_drafts: Tensor  # [max_reqs] int64: drafts that were verified

    @staticmethod
    def make(max_reqs: int, width: int, device: torch.device) -> "Verdict":
        return Verdict.of(
            torch.zeros(max_reqs * (width + 2), dtype=torch.int64, device=device), max_reqs
        )

    @staticmethod
    def of(packed: Tensor, max_reqs: int) -> "Verdict":
        token_ids, num_tokens, num_drafts = packed.split(
            (packed.shape[0] - 2 * max_reqs, max_reqs, max_reqs)
        )
        return Verdict(packed, token_ids.view(max_reqs, -1), num_tokens, num_drafts)


class Verifier:
    """Accepts drafts and draws the token after them."""

    def __init__(self, sampler: Sampler, spec: SpecConfig | None, vocab_size: int) -> None:
        self.sampler = sampler
        self.num_drafts = spec.num_drafts if spec else 0
        state, slots = sampler.state, sampler.slots
        device = slots.token_ids.device
        self.rates: Tensor | None = None
        self.accepts_none: Tensor | None = None  # [(slots + 1) * K] bool
        if spec and spec.synthetic_rates is not None:
            self.rates = torch.tensor(spec.synthetic_rates, device=device)
            if not any(spec.synthetic_rates):  # spare benchmarks the random numbers
                rows = state.seeds.shape[0]
                self.accepts_none = torch.zeros(rows * self.num_drafts, device=device).bool()
        # The logits that each draft was drawn from, by slot; only `probabilistic` drafts need them.
        self.draft_logits: Tensor | None = None
        if spec and spec.draft_sample_method == "probabilistic":
            shape = (state.seeds.shape[0], self.num_drafts, vocab_size)
            self.draft_logits = torch.zeros(shape, dtype=torch.float32, device=device)

    def verify(
        self,
        logits: Tensor,
        batch: InputBatch,
        where: Positions | None,
        needs: SamplingNeeds,
        out: Verdict,
    ) -> None:
        """Write the accepted drafts and the token after them to `out`.

        logits: [num_reqs * width, vocab_size], overwritten; width is one more than the places for
        drafts, 1 to K + 1
        where: positions of the logits; None if all rows take the likeliest token
        """
        if needs.masked:
            self.sampler.mask_(logits, batch.num_reqs_padded)
        if where is None:
            chosen = greedy(logits, checks=True)
        else:
            self.sampler.adjust_(logits, where, needs)
            chosen = self.sampler.draw(logits, where, needs, checks=True)
        chosen = chosen.view(batch.num_reqs_padded, -1)
        accepts: Tensor | None = None
        count, num_drafts = chosen.shape[0], chosen.shape[1] - 1
        if num_drafts and self.accepts_none is not None:
            accepts = self.accepts_none[: count * num_drafts].view(count, num_drafts)
        elif num_drafts and self.rates is not None:
            rows = _Rows(self.sampler, batch, num_drafts)
            rates = self.rates[:num_drafts]
            accepts = ops.accept_at_rate(rates, rows.seeds, rows.num_tokens)
        elif num_drafts and needs.noise and self.draft_logits is not None:
            rows = _Rows(self.sampler, batch, num_drafts)
            accepts, chosen = self._by_ratio(logits, chosen, rows)
        ops.write_verdict(
            chosen,
            accepts,
            self.sampler.slots,
            batch.step,
            out.token_ids,
            out.num_tokens,
            out.num_drafts,
        )

    def _by_ratio(self, logits: Tensor, chosen: Tensor, rows: "_Rows") -> tuple[Tensor, Tensor]:
        """Apply the ratio test to rows at a temperature; greedy rows accept what matches."""
        assert self.draft_logits is not None
        accepts, redrawn = ops.judge_drafts(
            logits.view(*chosen.shape, -1),
            self.draft_logits,
            rows.drafts,
            self.sampler.state.seeds,
            rows.num_tokens,
            rows.slot,
        )
        # A position without a draft has no residual: it is drawn as in plain decoding.
        number = torch.arange(chosen.shape[1] - 1, device=chosen.device)
        drafted = number < rows.num_drafts[:, None]
        noisy = (rows.temperature > 0)[:, None]
        replaced = noisy & drafted & (chosen[:, :-1] >= 0)
        chosen = torch.cat((torch.where(replaced, redrawn, chosen[:, :-1]), chosen[:, -1:]), dim=1)
        return torch.where(noisy, accepts, chosen[:, :-1] == rows.drafts), chosen


class _Rows:
    """A batch's rows with their drafts, gathered from slot state."""

    def __init__(self, sampler: Sampler, batch: InputBatch, width: int) -> None:
        slots, state = sampler.slots, sampler.state
        self.slot = batch.row_slots
        self.num_tokens = slots.num_tokens[self.slot]
        self.num_drafts = batch.row_drafts
        self.seeds = state.seeds[self.slot]
        self.temperature = state.temperature[self.slot]
        self.drafts = ops.drafts_of(slots, batch.step, batch.num_reqs_padded, width)
