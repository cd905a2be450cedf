"""The protocols that models and draft models implement for the rest of the engine.

Nothing outside models/ names a model class: models come from `registry` and `loader`, draft models
from `head_loader`.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stoop.config.schema import HeadSpec, ModelSpec
from stoop.layers.embedding import Embedding, OutputHead
from stoop.layers.norm import RMSNorm
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightView
from stoop.model_state.base import ModelState, ModelStateSetup


class Module(Protocol):
    """What both protocols share: a module with weights. Its stateful layers declare their state."""

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]: ...

    def weight_views(self) -> Iterator[WeightView]:
        """Every tensor that the checkpoint must have, under the checkpoint's names."""
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
        """The dtype of computation; matrices may be stored in another one."""
        ...

    def prepare(self, num_positions: int) -> None:
        """Compute tensors that are derived rather than loaded, such as rotary tables."""
        ...

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: ForwardContext,
        taps: Sequence[int] = (),
        out: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Map [tokens] ids and positions to [tokens, hidden_size] normalised hidden states.

        They are written to `out` if it is given. Also returns the residual stream at each tap: as
        it enters layer `tap`, or, where the tap is the number of layers, as it leaves the last one.
        """
        ...

    def make_model_state(self, setup: ModelStateSetup) -> ModelState:
        """Create the object that carries its states from step to step.

        A model whose only state is KV returns a `DefaultModelState`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [n, hidden_size] to [n, vocab_size], in float32 or better."""
        ...

    def is_derived(self, name: str) -> bool:
        """Whether a checkpoint tensor can be derived from others and is not loaded."""
        ...

    def bytes_read(self) -> int:
        """Bytes of weights that a step with few tokens reads."""
        ...


class DraftModel(Module, Protocol):
    """A head that drafts from the target's hidden states, one token per pass."""

    @property
    def spec(self) -> HeadSpec: ...

    @property
    def norm(self) -> RMSNorm | None:
        """The final norm, if the head has one."""
        ...

    @property
    def lm_head(self) -> OutputHead | None:
        """The head's own LM head, or rows that it took of the target's; None if it uses all."""
        ...

    @property
    def d2t(self) -> Tensor | None:
        """[draft vocabulary] int64: target id minus draft id; None if the ids are the same."""
        ...

    @property
    def output_head(self) -> OutputHead:
        """`lm_head`, or the target's."""
        ...

    def attach(self, target: Model, num_positions: int) -> None:
        """Use the target's modules where the head has none of its own; build the rotary table."""
        ...

    def condense(self, streams: Tensor) -> Tensor:
        """Map [tokens, number of taps, target_hidden_size] to features [tokens, hidden_size]."""
        ...

    def __call__(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Run one pass; returns [tokens, hidden_size], the stream as it leaves the last layer."""
        ...

    def finish(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Turn rows of the stream into states for `logits` and features for the next pass."""
        ...

    def states(
        self,
        token_ids: Tensor,
        features: Tensor,
        positions: Tensor,
        ctx: ForwardContext,
        wanted: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        """One pass, and `finish` for the tokens `wanted`, [n] int64, or for all.

        Returns the states; writes the features to `out`, and zeros after them. A head may compute
        nothing but KV of the other tokens.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Map [n, hidden_size] to [n, draft vocabulary], in float32 or better."""
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary to the target's token ids."""
        ...

    def bytes_read(self, num_passes: int) -> int:
        """Bytes of weights that this many passes over few tokens read."""
        ...


def parameter_bytes(module: Module | nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
