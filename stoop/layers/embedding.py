"""Token embeddings and the LM head, tied or not."""

from collections.abc import Iterator

from torch import Tensor, nn

from stoop.layers.norm import RMSNorm, join_normed
from stoop.layers.weights import MatrixLayer, WeightView
from stoop.ops.linear import logits_of
from stoop.ops.norm import join_embedded
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
        """Concatenate the normalised embeddings and the normalised x [tokens, n]."""
        matrix, eps = self.matrix, x_norm.eps
        if matrix.is_plain(x.dtype):
            return join_embedded(token_ids, matrix.data, norm.weight, x, x_norm.weight, eps)
        return join_normed((self(token_ids), x), (norm, x_norm))

    def weight_views(self) -> Iterator[WeightView]:
        yield self._view("weight", 0, self.vocab_size)


class OutputHead(MatrixLayer):
    """Maps hidden states to logits, by its own matrix or by a tied embedding's."""

    own: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: Embedding | None) -> None:
        super().__init__("own", vocab_size, hidden_size, own=tied_to is None)
        self.vocab_size = vocab_size
        # In a tuple, so that the embedding is not a submodule: moving the module to another device
        # would give each of the two its own copy of the matrix.
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
        """Map [n, hidden_size] to [n, vocab_size], in float32 or better."""
        return logits_of(hidden, self.matrix)

    def weight_views(self) -> Iterator[WeightView]:
        if not self.tied:
            yield self._view("weight", 0, self.vocab_size)
