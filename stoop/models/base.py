"""What the rest of the engine asks of a model and of a draft model.

Nothing outside of models/ names a model class: models come from `registry` and `loader`, draft
models from `head_loader`.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stoop.config.schema import HeadSpec, ModelSpec
from stoop.layers.embedding import Embedding, OutputHead
from stoop.layers.norm import RMSNorm
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightSlot
from stoop.model_state.base import ModelState, ModelStateSetup


class Module(Protocol):
    """What both are: a module with weights. Its stateful layers say what they keep."""

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]: ...

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor that its checkpoint must have, by the checkpoint's names."""
        ...


class Model(Module, Protocol):
    """A language model. Draft models borrow its embedding, LM head and last norm."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def embed_tokens(self) -> Embedding: ...

    @property
    def norm(self) -> RMSNorm: ...

    @property
    def lm_head(self) -> OutputHead: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of computation. Matrices may be stored in another."""
        ...

    def prepare(self, num_positions: int) -> None:
        """Make what is derived rather than loaded, such as rotary tables."""
        ...

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: ForwardContext,
        taps: Sequence[int] = (),
        out: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """[tokens] ids and positions to [tokens, hidden_size] normalised hidden states, in `out` if
        given.

        Returned with them: the residual stream as it enters each layer of `taps`, or, for the
        number of layers, as it leaves the last one.
        """
        ...

    def make_model_state(self, setup: ModelStateSetup) -> ModelState:
        """What moves its states from step to step: `DefaultModelState` if they are KV alone."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], in float32 or better."""
        ...

    def is_derived(self, name: str) -> bool:
        """Whether a checkpoint's tensor follows from others, and is not loaded."""
        ...

    def bytes_read(self) -> int:
        """Bytes of weights that a step of few tokens reads."""
        ...


class DraftModel(Module, Protocol):
    """A head that drafts from the target's hidden states, one token a pass."""

    @property
    def spec(self) -> HeadSpec: ...

    @property
    def norm(self) -> RMSNorm | None:
        """The last norm, if it has one."""
        ...

    @property
    def lm_head(self) -> OutputHead | None:
        """None: it borrows the target's."""
        ...

    @property
    def d2t(self) -> Tensor | None:
        """[draft vocabulary] int64: token ids of the target less those of drafts; None: alike."""
        ...

    @property
    def output_head(self) -> OutputHead:
        """Its own LM head or the target's."""
        ...

    def attach(self, target: Model, num_positions: int) -> None:
        """Borrow from the target what the head lacks; make its rotary table."""
        ...

    def condense(self, streams: Tensor) -> Tensor:
        """[tokens, number of taps, target_hidden_size] to features [tokens, hidden_size]"""
        ...

    def __call__(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """One pass: [tokens, hidden_size], the stream as it leaves the last layer."""
        ...

    def finish(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows of the stream: states to make logits of, and features for the next pass."""
        ...

    def take(self, stream: Tensor, index: Tensor | None, features: Tensor) -> Tensor:
        """`finish` of the rows that `index` names, or of all; features go into a buffer."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """[n, hidden_size] to [n, draft vocabulary], in float32 or better."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Numbers of the draft vocabulary as token ids of the target."""
        ...

    def bytes_read(self, num_passes: int) -> int:
        """Bytes of weights that so many passes over few tokens read."""
        ...


def parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
