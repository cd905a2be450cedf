"""Embedding lookup."""

import torch.nn.functional as F
from torch import Tensor

from stoop.ops.dispatch import op


@op("table")
def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Look up one row of the table per token.

    token_ids: [tokens], table: [vocab_size, n]; returns [tokens, n]
    """
    return F.embedding(token_ids, table)
