"""From a draft head's states to drafts: by its own LM head, the target's, or some of its rows.

A head with `draft_tokens` takes the rows of those tokens from the target's LM head once, when it is
attached, and drafts by this smaller matrix. Its drafts have ids of their own, as those of a head
that was trained with a smaller vocabulary: `d2t` maps them to the target's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from stoop.config.schema import HeadSpec
from stoop.layers.embedding import OutputHead
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightView, prefixed, vector_view
from stoop.models.base import Model, parameter_bytes


class OutputSpec(HeadSpec, Protocol):
    """What the output of a head depends on."""

    @property
    def maps_vocabulary(self) -> bool:
        """Whether the checkpoint has a `d2t`."""
        ...


class DraftOutput(nn.Module, ABC):
    """The base of draft heads. A subclass calls `make_output` when it is built, so that these
    weights come after its own, and `attach_output` when it is attached."""

    spec: OutputSpec
    lm_head: OutputHead | None
    d2t: nn.Parameter | None

    def make_output(self, spec: OutputSpec) -> None:
        size, taken = spec.vocab_size, spec.draft_tokens is not None
        own = spec.own_lm_head or taken
        self.lm_head = OutputHead(size, spec.hidden_size, None) if own else None
        self.d2t = (
            nn.Parameter(torch.empty(size, dtype=torch.int64), requires_grad=False)
            if spec.maps_vocabulary or taken
            else None
        )
        self._target: tuple[Model, ...] = ()  # in a tuple, so that it is not a submodule

    def attach_output(self, target: Model) -> None:
        self._target = (target,)
        if self.spec.draft_tokens is None:
            return
        assert self.lm_head is not None and self.d2t is not None
        token_ids = torch.tensor(self.spec.draft_tokens.token_ids, device=self.d2t.device)
        self.lm_head.take_rows(target.lm_head.matrix, token_ids)
        draft_ids = torch.arange(len(token_ids), device=self.d2t.device)
        self.d2t.data.copy_(token_ids - draft_ids)

    def states(
        self,
        token_ids: Tensor,
        features: Tensor,
        positions: Tensor,
        ctx: ForwardContext,
        wanted: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        """See `DraftModel`."""
        return self.take(self(token_ids, features, positions, ctx), wanted, out)

    @abstractmethod
    def take(self, stream: Tensor, index: Tensor | None, features: Tensor) -> Tensor:
        """Turn the rows of a pass in `index`, or all, into states for `logits`.

        Writes the features of the next pass to `features`, and zeros after them.
        """

    @property
    def target(self) -> Model:
        (target,) = self._target
        return target

    @property
    def output_head(self) -> OutputHead:
        return self.lm_head or self.target.lm_head

    def logits(self, states: Tensor) -> Tensor:
        """Map [n, hidden_size] to [n, draft vocabulary], in float32 or better."""
        logits: Tensor = self.output_head(states)
        return logits

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary to the target's token ids."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def output_views(self) -> Iterator[WeightView]:
        """The tensors that the checkpoint must have; rows taken from the target are none."""
        if self.spec.own_lm_head:
            assert self.lm_head is not None
            yield from prefixed("lm_head", self.lm_head.weight_views())
        if self.spec.maps_vocabulary:
            assert self.d2t is not None
            yield vector_view("d2t", self.d2t)

    def output_bytes(self) -> int:
        """Bytes of weights that `logits` reads."""
        tied = self.target.embed_tokens if self.output_head.tied else None
        return parameter_bytes(tied or self.output_head)
