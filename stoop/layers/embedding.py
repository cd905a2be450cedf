"""Token embeddings and the output head, tied or not."""

from collections.abc import Iterator

from torch import Tensor, nn

from stoop.layers.norm import RMSNorm
from stoop.layers.weights import MatrixLayer, WeightSlot
from stoop.ops.linear import logits_of
from stoop.ops.norm import join_embedded, join_norms
from stoop.ops.weight import Weight


class Embedding(MatrixLayer):
    weight: nn.Parameter

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__("weight", vocab_size, hidden_size)
        self.vocab_size = vocab_size

    def forward(self, token_ids: Tensor) -> Tensor:
        matrix = self.matrix
        return matrix.scheme.embed(token_ids, matrix, self.compute_dtype or matrix.data.dtype)

    def joined(self, token_ids: Tensor, norm: RMSNorm, x: Tensor, x_norm: RMSNorm) -> Tensor:
        """[tokens, 2n]: embeddings and x, each normalised, side by side. x: [tokens, n]"""
        matrix, eps = self.matrix, x_norm.eps
        if matrix.is_plain(x.dtype):
            return join_embedded(token_ids, matrix.data, norm.weight, x, x_norm.weight, eps)
        return join_norms((self(token_ids), x), (norm.weight, x_norm.weight), eps)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield self._slot("weight", 0, self.vocab_size)


class OutputHead(MatrixLayer):
    """Hidden states to logits, through its own matrix or through the embeddings'."""

    own: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: Embedding | None) -> None:
        super().__init__("own", vocab_size, hidden_size, own=tied_to is None)
        self.vocab_size = vocab_size
        # In a tuple, so that the embedding is not registered as a part of this module: moving a
        # module to another device would give each of the two a matrix of its own.
        self._tied_to = () if tied_to is None else (tied_to,)

    @property
    def tied(self) -> bool:
        return bool(self._tied_to)

    @property
    def matrix(self) -> Weight:
        return self._tied_to[0].matrix if self._tied_to else super().matrix

    @property
    def weight(self) -> Tensor:
        return self.matrix.data

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], in float32 or better."""
        return logits_of(hidden, self.matrix)

    def weight_slots(self) -> Iterator[WeightSlot]:
        if not self.tied:
            yield self._slot("weight", 0, self.vocab_size)
