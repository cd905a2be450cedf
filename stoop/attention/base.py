"""The protocol that every attention backend follows.

A backend builds one metadata object a step on the host and reads it in every layer. What it keeps
between steps lives in persistent buffers; what depends on a batch lives in the metadata.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor

from stoop.batch.input_batch import InputBatch


class GraphSupport(IntEnum):
    """Which batches a backend can serve from inside a captured graph, weakest first."""

    NEVER = 0
    SINGLE_TOKEN = 1  # one query token a request
    UNIFORM = 2  # the same number of query tokens for each request
    ALWAYS = 3


@dataclass(frozen=True)
class AttentionShape:
    """The part of a layer's attention that never changes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and window - 1 before it


class AttentionBackend(Protocol):
    name: str
    graph_support: GraphSupport

    def build(self, batch: InputBatch, for_capture: bool = False) -> Any:
        """Metadata of one step. With `for_capture`, bounds are the worst case, not the batch's."""
        ...

    def forward(self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: Any) -> Tensor:
        """Attend to the cache, which holds this step's keys and values already.

        q: [tokens, heads, head_dim], cache: [2, num_blocks, block_size, kv_heads, head_dim];
        returns the shape of q.
        """
        ...


@dataclass(frozen=True)
class ForwardContext:
    """What a model's layers need beside their inputs; passed down, never a global."""

    backend: AttentionBackend
    metadata: Any
    slot_mapping: Tensor  # [tokens] int64
    kv_caches: list[Tensor]  # one a layer
