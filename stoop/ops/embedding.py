"""The lookup of embeddings."""

import torch.nn.functional as F
from torch import Tensor

from stoop.ops.kernels.choice import uses_kernels


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """token_ids: [tokens], table: [vocab_size, n]; returns [tokens, n]"""
    if uses_kernels(table):
        from stoop.ops.kernels import embedding as kernels

        return kernels.embed(token_ids, table)
    return F.embedding(token_ids, table)
