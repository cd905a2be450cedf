"""MTP heads: one more decoder layer, which the target's own checkpoint holds.

At position i the head joins the embedding of token i + 1 and the target's normalised state of
position i, each with its own norm, by a linear layer. One decoder layer of the target's kind and a
norm follow; the target's LM head predicts token i + 2. The normalised output is the feature of the
next draft, so one module makes any number of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from stoop.config.schema import DraftTokens
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm
from stoop.layers.rope import RotaryTable
from stoop.layers.stateful import ForwardContext
from stoop.layers.weights import WeightView, prefixed, renamed
from stoop.models.base import Model, parameter_bytes
from stoop.models.decoder import DecoderSpec
from stoop.models.draft_output import DraftOutput


@dataclass(frozen=True)
class MtpSpec:
    """An MTP head: its sizes are the target's."""

    target: DecoderSpec
    method: Literal["mtp"] = "mtp"
    taps: tuple[int, ...] = ()  # none: it reads the target's last hidden state
    own_lm_head: bool = False  # it uses the target's
    maps_vocabulary: bool = False
    draft_tokens: DraftTokens | None = None  # of the target's LM head; None: all of them

    @property
    def vocab_size(self) -> int:
        chosen = self.draft_tokens
        return self.target.vocab_size if chosen is None else len(chosen.token_ids)

    @property
    def hidden_size(self) -> int:
        return self.target.hidden_size

    @property
    def max_position(self) -> int:
        return self.target.max_position


class MtpHead(DraftOutput, ABC):
    """A `DraftModel` (models/base.py). A family says what its layer and its norms are."""

    # The checkpoint's names of `fc`, `embedding_norm`, `feature_norm`, `layer` and `norm`.
    names: Mapping[str, str]
    prefix: str  # of the names of all tensors that belong to MTP heads
    spec: MtpSpec

    def __init__(self, spec: MtpSpec) -> None:
        super().__init__()
        self.spec, size = spec, spec.hidden_size
        self.fc = FusedLinear(("fc",), 2 * size, (size,), bias=False)
        self.embedding_norm = self.make_norm()
        self.feature_norm = self.make_norm()
        self.layer = self.make_layer()
        self.norm = self.make_norm()
        self.make_output(spec)
        self.rotary: RotaryTable | None = None

    @abstractmethod
    def make_layer(self) -> nn.Module:
        """A layer with attention, `weight_views()` and the `forward` of `DecoderLayer`."""

    @abstractmethod
    def make_norm(self) -> RMSNorm:
        """A norm over `hidden_size` values."""

    def attach(self, target: Model, num_positions: int) -> None:
        """Use the target's embedding and LM head; build the rotary table."""
        self.attach_output(target)
        spec = self.spec.target
        self.rotary = RotaryTable(
            spec.rope, spec.rotated, num_positions, device=target.device, dtype=target.dtype
        )

    def condense(self, streams: Tensor) -> Tensor:
        raise AssertionError("an MTP head has no taps")

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> Tensor:
        """Run one pass; returns [tokens, hidden_size], the stream as it leaves the layer.

        token_ids: [tokens], the token after each position; features: [tokens, hidden_size]
        """
        assert self.rotary is not None, "call attach() first"
        embedding = self.target.embed_tokens
        joined = embedding.joined(token_ids, self.embedding_norm, features, self.feature_norm)
        stream: Tensor = self.layer(self.fc(joined), self.rotary.at(positions), ctx)
        return stream

    def finish(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Turn rows of the stream into states for `logits` and features for the next pass."""
        normed = self.norm(stream)
        return normed, normed

    def take(self, stream: Tensor, index: Tensor | None, features: Tensor) -> Tensor:
        """See `DraftOutput`."""
        states = self.norm.take(stream, index, features)
        features[: states.shape[0]].copy_(states)
        return states

    def weight_views(self) -> Iterator[WeightView]:
        """Every tensor that the checkpoint must have, under its names there."""
        yield from renamed(self.names, self.fc.weight_views())
        for part in ("embedding_norm", "feature_norm", "layer", "norm"):
            views = getattr(self, part).weight_views()
            yield from renamed(self.names, prefixed(part, views))

    def bytes_read(self, num_passes: int) -> int:
        """Bytes of weights that this many passes over few tokens read."""
        parts = (self.fc, self.embedding_norm, self.feature_norm, self.layer, self.norm)
        return num_passes * (sum(map(parameter_bytes, parts)) + self.output_bytes())
