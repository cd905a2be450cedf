"""Logits to tokens, each row by its own request's parameters."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from stoop.core.request import TokenRules
from stoop.core.sampling_kind import SamplingKind
from stoop.ops import sampling as ops
from stoop.ops.inputs import SlotTensors
from stoop.sampling.state import SamplingState


@dataclass(frozen=True)
class SamplingNeeds:
    """Which passes over the vocabulary a batch needs; a greedy batch needs none."""

    noise: bool = False
    bias: bool = False
    penalties: bool = False
    min_tokens: bool = False
    bad_words: bool = False
    min_p: bool = False
    top_p: bool = False
    top_k_width: int = 0  # the largest top_k; 0: no row has one; -1: only some rows have one
    masked: bool = False  # by a grammar

    @staticmethod
    def of(rules: Iterable[TokenRules]) -> "SamplingNeeds":
        every = list(rules)
        params = [r.params for r in every]
        noisy = [p for p in params if not p.greedy]
        return SamplingNeeds(
            noise=bool(noisy),
            bias=any(p.logit_bias for p in params),
            penalties=any(p.penalised for p in params),
            min_tokens=any(r.params.min_tokens and r.stop_ids for r in every),
            bad_words=any(r.bad_words for r in every),
            min_p=any(p.min_p > 0 for p in noisy),
            top_p=any(p.top_p < 1 for p in noisy),
            top_k_width=_width([p.top_k for p in noisy]),
            masked=any(p.structured_outputs is not None for p in params),
        )

    @property
    def kind(self) -> SamplingKind:
        """The smallest kind that serves this batch; scores and masks are not part of it."""
        if self.edits_logits or self.min_p or self.filters:
            return SamplingKind.FULL
        return SamplingKind.NOISE if self.noise else SamplingKind.GREEDY

    @staticmethod
    def of_kind(kind: SamplingKind, masked: bool = False) -> "SamplingNeeds":
        """Everything that a batch of this kind may need: what a graph must contain."""
        if kind is SamplingKind.GREEDY:
            return SamplingNeeds(masked=masked)
        every = kind is SamplingKind.FULL
        return SamplingNeeds(
            noise=True,
            bias=every,
            penalties=every,
            min_tokens=every,
            bad_words=every,
            min_p=every,
            top_p=every,
            masked=masked,
        )

    @property
    def edits_logits(self) -> bool:
        return self.bias or self.penalties or self.min_tokens or self.bad_words

    @property
    def filters(self) -> bool:
        return self.top_p or self.top_k_width != 0


def _width(top_ks: list[int]) -> int:
    """`top_k_width` of the noisy rows; greedy rows need only the top of the sorted vocabulary."""
    if not any(top_ks):
        return 0
    return max(top_ks) if all(top_ks) else -1


@dataclass(frozen=True)
class Positions:
    """Positions in requests that get a token each."""

    slot: Tensor  # [n] int64: the request's slot; the sink for padding
    num_tokens: Tensor  # [n] int64: tokens before the position, drafts included
    max_seq_len: int  # bound of num_tokens, of rows that sample


class Sampler:
    """Draws tokens by the parameters and histories of slots.

    masks: of the step, which the host writes; None if there are no grammars
    """

    def __init__(
        self, state: SamplingState, slots: SlotTensors, masks: ops.MaskTensors | None = None
    ) -> None:
        self.state = state
        self.slots = slots
        self.masks = masks

    def mask_(self, logits: Tensor, num_reqs: int) -> None:
        """Rule out what grammars forbid. It comes first: all else sees the tokens that are left.

        logits: [num_reqs * width, vocab_size]
        """
        assert self.masks is not None
        width = logits.shape[0] // num_reqs
        ops.apply_masks_(logits, self.masks.bits, self.masks.rows[:num_reqs, :width].flatten())

    def adjust_(self, logits: Tensor, where: Positions, needs: SamplingNeeds) -> None:
        """Apply edits, temperature and filters: the result is the distribution to draw from.

        logits: [n, vocab_size]
        """
        if needs.edits_logits:
            self._edit_(logits, where, needs)
        if not needs.noise:
            return
        state = self.state
        ops.filter_(
            logits,
            state.temperature,
            state.min_p if needs.min_p else None,
            state.top_k if needs.filters else None,
            state.top_p if needs.filters else None,
            where.slot,
            max(needs.top_k_width, 0),
        )

    def draw(
        self, logits: Tensor, where: Positions, needs: SamplingNeeds, checks: bool = False
    ) -> Tensor:
        """[n] int64: a token for each adjusted row; greedy rows take the likeliest.

        checks: -1 for a row without one: its logits have NaN, or every token is ruled out
        """
        if not needs.noise:
            return ops.greedy(logits, checks)
        # The token to come is number `num_tokens` of its request: the key of its noise.
        state, positions = self.state, where.num_tokens
        return ops.draw(
            logits, state.temperature, state.seeds, positions, slot=where.slot, checks=checks
        )

    def _edit_(self, logits: Tensor, where: Positions, needs: SamplingNeeds) -> None:
        state, slots, slot = self.state, self.slots, where.slot
        history = ops.History(
            slots.token_ids, where.num_tokens, slots.num_prompt_tokens, where.max_seq_len
        )
        if needs.bias:
            ops.add_bias_(logits, state.bias_ids, state.bias_values, state.bias_counts, slot)
        if needs.min_tokens:
            stops, counts = state.stop_ids, state.stop_counts
            ops.forbid_stops_(logits, stops, counts, state.min_tokens, history, slot)
        if needs.bad_words:
            words, counts = state.bad_words, state.bad_word_counts
            ops.forbid_bad_words_(logits, words, counts, history, slot)
        if needs.penalties:
            penalties = (state.repetition, state.presence, state.frequency)
            ops.penalise_(logits, history, *penalties, slot)
