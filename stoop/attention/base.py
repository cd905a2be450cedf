"""The protocol that every attention backend follows.

A backend builds one metadata object a step on the host and reads it in every layer. What it keeps
between steps lives in persistent buffers; what depends on a batch lives in the metadata.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.config.schema import AttentionSpec
from stoop.graph.support import GraphSupport
from stoop.ops.inputs import SlotTensors
from stoop.ops.rope import HeadNorms, Rotation, rotate_and_store


@dataclass(frozen=True)
class AttentionShape:
    """The part of a layer's attention that never changes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and window - 1 before it

    @staticmethod
    def of(spec: AttentionSpec, window: int | None) -> "AttentionShape":
        scale = spec.head_dim**-0.5
        return AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, scale, window)


def attention_shapes(decoders: Sequence[AttentionSpec]) -> tuple[AttentionShape, ...]:
    """The distinct ones of all layers."""
    found = (AttentionShape.of(spec, w) for spec in decoders for w in spec.windows or (None,))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class AttentionSetup:
    """What a backend is made for."""

    device: torch.device
    block_size: int
    max_reqs: int
    max_model_len: int
    slots: SlotTensors
    dtype: torch.dtype = torch.float32  # of queries and cache
    shapes: tuple[AttentionShape, ...] = ()  # distinct ones of all layers, the drafter's too
    query_len: int = 1  # query tokens of a decoding request


class AttentionBackend(Protocol):
    """Query tokens of a row stand behind its context, `context_lens`. Keys are live up to
    `seq_lens`; query tokens past that are dead, and may come out as anything finite."""

    name: str
    graph_support: GraphSupport

    def buffers(self) -> dict[str, Tensor]:
        """Its persistent buffers, all written anew for every step."""
        ...

    def build(self, batch: InputBatch, for_capture: bool = False) -> Any:
        """Metadata of one step, its persistent buffers written over their whole padded extent.

        With `for_capture`, bounds are the worst case that the graph must serve.
        """
        ...

    @property
    def advance(self) -> Callable[[Any], None] | None:
        """Makes metadata fit lengths that have changed on the device since it was built, inside a
        graph; None where only the host can."""
        ...

    def forward(self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: Any) -> Tensor:
        """Attend to the cache, which holds this step's keys and values already.

        q: [tokens, heads, head_dim], cache: [2, num_blocks, block_size, kv_heads, head_dim];
        returns the shape of q. Rows of padded tokens come out as zeros.
        """
        ...


class ForwardContext(Protocol):
    """What a model's layers need beside their inputs; passed down, never a global."""

    def attend(
        self,
        layer: int,
        shape: AttentionShape,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
    ) -> Tensor:
        """Turn queries and keys, store keys and values, and attend.

        qkv: [tokens, heads + 2 * kv_heads, head_dim]; returns [tokens, heads, head_dim]
        """
        ...


@dataclass(frozen=True)
class PagedContext:
    """Attention over the paged cache, right where it is called."""

    backend: AttentionBackend
    metadata: Any
    slot_mapping: Tensor  # [tokens] int64
    kv_caches: list[Tensor]  # one a layer

    def attend(
        self,
        layer: int,
        shape: AttentionShape,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
    ) -> Tensor:
        cache, slots = self.kv_caches[layer], self.slot_mapping
        q = rotate_and_store(qkv, shape.num_kv_heads, rotation, norms, cache, slots)
        return self.backend.forward(shape, q, cache, self.metadata)
