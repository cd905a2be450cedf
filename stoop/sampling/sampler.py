"""From logits to tokens, each row by its request's own parameters."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from stoop.core.request import TokenRules
from stoop.graph.descriptor import SamplingKind
from stoop.ops import sampling as ops
from stoop.ops.inputs import SlotTensors
from stoop.ops.kernels.choice import uses_kernels
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
    top_k_width: int = 0  # the largest top_k; 0: no row has one; -1: only some have

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
        )

    @property
    def kind(self) -> SamplingKind:
        """The least of the kinds that serves this batch, scores aside."""
        if self.edits_logits or self.min_p or self.filters:
            return SamplingKind.FULL
        return SamplingKind.NOISE if self.noise else SamplingKind.GREEDY

    @staticmethod
    def of_kind(kind: SamplingKind) -> "SamplingNeeds":
        """Everything that a batch of this kind may need: what a graph must hold."""
        if kind is SamplingKind.GREEDY:
            return SamplingNeeds()
        every = kind is SamplingKind.FULL
        return SamplingNeeds(
            noise=True,
            bias=every,
            penalties=every,
            min_tokens=every,
            bad_words=every,
            min_p=every,
            top_p=every,
        )

    @property
    def edits_logits(self) -> bool:
        return self.bias or self.penalties or self.min_tokens or self.bad_words

    @property
    def filters(self) -> bool:
        return self.top_p or self.top_k_width != 0


def _width(top_ks: list[int]) -> int:
    """How much of the sorted vocabulary the filters must see; greedy rows need only its top."""
    if not any(top_ks):
        return 0
    return max(top_ks) if all(top_ks) else -1


@dataclass(frozen=True)
class Positions:
    """Places in requests' texts that get a token each."""

    slot: Tensor  # [n] int64 of the request; the sink for padding
    num_tokens: Tensor  # [n] int64: tokens before the place, drafts included
    max_seq_len: int  # no place that counts has more


class Sampler:
    def __init__(self, state: SamplingState, slots: SlotTensors) -> None:
        self.state = state
        self.slots = slots

    def adjust_(self, logits: Tensor, where: Positions, needs: SamplingNeeds) -> None:
        """Edits, temperature and filters: what is left is the distribution to draw from.

        logits: [n, vocab_size]
        """
        if uses_kernels(logits):
            self._adjust_by_kernels_(logits, where, needs)
            return
        if needs.edits_logits:
            self._edit_(logits, where, needs)
        if not needs.noise:
            return
        state, slot = self.state, where.slot
        ops.temper_(logits, state.temperature[slot])
        if needs.min_p:
            ops.apply_min_p_(logits, state.min_p[slot])
        if needs.filters:
            width = needs.top_k_width if needs.top_k_width > 0 else logits.shape[1]
            ops.apply_top_k_top_p_(logits, state.top_k[slot], state.top_p[slot], width)

    def draw(self, logits: Tensor, where: Positions, needs: SamplingNeeds) -> Tensor:
        """[n] int64: a token of each adjusted row; greedy rows take the likeliest."""
        if not needs.noise:
            return ops.greedy(logits)
        # The token to come is number `num_tokens` of its request: the key of its noise.
        state, slot, places = self.state, where.slot, where.num_tokens
        if uses_kernels(logits):
            from stoop.ops.kernels import sampling as kernels

            return kernels.draw(logits, state.temperature, state.seeds, places, slot=slot)
        return ops.draw(logits, state.temperature[slot], state.seeds[slot], places)

    def _adjust_by_kernels_(self, logits: Tensor, where: Positions, needs: SamplingNeeds) -> None:
        """The same by kernels, which read parameters and history by slot where they lie."""
        from stoop.ops.kernels import sampling_edits as edits
        from stoop.ops.kernels import sampling_filters as filters

        state, slots, slot = self.state, self.slots, where.slot
        history = ops.History(slots.token_ids, where.num_tokens, slots.num_prompt_tokens)
        if needs.bias:
            edits.add_bias_(logits, state.bias_ids, state.bias_values, state.bias_counts, slot)
        if needs.min_tokens:
            stops, counts = state.stop_ids, state.stop_counts
            edits.forbid_stops_(logits, stops, counts, state.min_tokens, history, slot)
        if needs.bad_words:
            edits.forbid_bad_words_(logits, state.bad_words, history, slot)
        if needs.penalties:
            penalties = (state.repetition, state.presence, state.frequency)
            edits.penalise_(logits, history, *penalties, slot)
        if needs.noise and (needs.min_p or needs.filters):
            filters.filter_(
                logits,
                state.temperature,
                state.min_p if needs.min_p else None,
                state.top_k if needs.filters else None,
                state.top_p if needs.filters else None,
                slot,
            )
        elif needs.noise:
            filters.temper_(logits, state.temperature, slot)

    def _edit_(self, logits: Tensor, where: Positions, needs: SamplingNeeds) -> None:
        state, slot = self.state, where.slot
        history = ops.History(
            self.slots.token_ids[slot, : where.max_seq_len].long(),
            where.num_tokens,
            self.slots.num_prompt_tokens[slot],
        )
        if needs.bias:
            bias = state.bias_values[slot]
            ops.add_bias_(logits, state.bias_ids[slot], bias, state.bias_counts[slot])
        if needs.min_tokens:
            num_output = history.num_tokens - history.num_prompt_tokens
            too_early = num_output < state.min_tokens[slot]
            ops.forbid_stops_(logits, state.stop_ids[slot], state.stop_counts[slot], too_early)
        if needs.bad_words:
            ops.forbid_bad_words_(logits, state.bad_words[slot], history)
        if needs.penalties:
            ops.penalise_(
                logits, history, state.repetition[slot], state.presence[slot], state.frequency[slot]
            )
