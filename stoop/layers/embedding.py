"""Token embeddings and the output head, tied or not."""

from collections.abc import Iterator

from torch import Tensor, nn

from stoop.layers.weights import WeightSlot, empty_parameter
from stoop.ops.embedding import embed
from stoop.ops.linear import logits_of


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return embed(token_ids, self.weight)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot("weight", self.weight.data)


class OutputHead(nn.Module):
    """Hidden states to logits, through its own matrix or through the embeddings'."""

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: Embedding | None) -> None:
        super().__init__()
        # In a tuple, so that the embedding is not registered as a part of this module: moving a
        # module to another device would give each of the two a matrix of its own.
        self._tied_to = (tied_to,)
        self.own = empty_parameter(vocab_size, hidden_size) if tied_to is None else None

    @property
    def tied(self) -> bool:
        return self.own is None

    @property
    def weight(self) -> Tensor:
        if self.own is not None:
            return self.own
        (embedding,) = self._tied_to
        assert embedding is not None
        return embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], in float32 or better."""
        return logits_of(hidden, self.weight)

    def weight_slots(self) -> Iterator[WeightSlot]:
        if self.own is not None:
            yield WeightSlot("weight", self.own.data)
