"""The protocol that every attention backend follows.

A backend builds one metadata object per step on the host and reads it in every layer. What it keeps
between steps lives in persistent buffers; what depends on a batch lives in the metadata.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.config.backends import BackendTraits, serving_backends
from stoop.config.errors import ConfigError
from stoop.config.schema import FP8
from stoop.graph.support import GraphSupport
from stoop.ops.inputs import SlotTensors


@dataclass(frozen=True)
class AttentionShape:
    """The fixed sizes of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and window - 1 before it
    value_scale: float = 1.0  # multiplies what is read from a cache in fp8; `scale` has the keys'


@dataclass(frozen=True)
class AttentionSetup:
    """What a backend is built for."""

    device: torch.device
    block_size: int
    max_reqs: int
    max_model_len: int
    slots: SlotTensors
    dtype: torch.dtype = torch.float32  # of queries and outputs
    shapes: tuple[AttentionShape, ...] = ()  # distinct ones of all layers, the drafter's too
    query_len: int = 1  # query tokens of a decoding request
    kv_dtype: torch.dtype | None = None  # of the cache; None for that of queries
    device_lengths: bool = False  # draft decodes: the host knows upper bounds of lengths only


def refuse_unsupported(traits: BackendTraits, setup: AttentionSetup) -> None:
    """Refuse what a backend does not declare to serve."""
    name, dtype = f"attention_backend={traits.name}", str(setup.dtype).removeprefix("torch.")
    kv_dtype = None if setup.kv_dtype is None else str(setup.kv_dtype).removeprefix("torch.")
    sizes = traits.head_sizes
    foreign = [s.head_dim for s in setup.shapes if sizes is not None and s.head_dim not in sizes]
    problem = None
    if traits.devices is not None and setup.device.type not in traits.devices:
        kinds = " or ".join(kind.upper() for kind in traits.devices)
        problem = f"does not run on {setup.device.type}: use a {kinds} device"
    elif traits.dtypes is not None and dtype not in traits.dtypes:
        problem = f"has no kernels for {dtype}: use dtype={' or '.join(traits.dtypes)}"
    elif foreign:
        known = ", ".join(map(str, sizes or ()))
        problem = f"has kernels for heads of {known}, none for {foreign[0]}: use another model"
    elif traits.block_sizes is not None and setup.block_size not in traits.block_sizes:
        known = ", ".join(map(str, traits.block_sizes))
        problem = f"does not take block_size={setup.block_size}: use one of {known}"
    elif not traits.reads(kv_dtype, dtype):
        able = ", ".join(serving_backends(setup.device.type, dtype, (), kv_dtype))
        kind = "fp8" if kv_dtype == FP8 else f"{kv_dtype} for computation in {dtype}"
        problem = f"cannot read a KV cache in {kind} ({able} can): use kv_cache_dtype=auto"
    if problem:
        raise ConfigError(f"{name} {problem}, or attention_backend=auto")


class AttentionBackend(Protocol):
    """An attention backend.

    The query tokens of a row follow its context of `context_lens` tokens. Keys are live up to
    `seq_lens`; query tokens past that are dead, and their outputs may be anything finite.
    """

    name: str
    graph_support: GraphSupport

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers, all of which every step rewrites."""
        ...

    def build(self, batch: InputBatch, for_capture: bool = False) -> Any:
        """Build the metadata of one step; fill the persistent buffers over their padded extent.

        With `for_capture`, bounds are the worst case that the graph must serve.
        """
        ...

    @property
    def advance(self) -> Callable[[Any], None] | None:
        """Updates metadata, inside a graph, for lengths that have changed on the device since it
        was built; None if only the host can."""
        ...

    def forward(self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: Any) -> Tensor:
        """Attend to the cache, which already holds this step's keys and values.

        q: [tokens, heads, head_dim], cache: [2, num_blocks, block_size, kv_heads, head_dim];
        returns a tensor of q's shape, with zeros for padded tokens. Only a cache in fp8 has a
        `shape.value_scale` other than 1, which multiplies the result.
        """
        ...


@dataclass(frozen=True)
class PagedMetadata:
    """A step's metadata for layers with paged state."""

    backend: AttentionBackend
    plan: Any  # what the backend's `build` returned
    slot_mapping: Tensor  # [tokens] int64: the KV slot of each token; -1 for none

    def attend(self, shape: AttentionShape, q: Tensor, cache: Tensor) -> Tensor:
        """As `AttentionBackend.forward`."""
        return self.backend.forward(shape, q, cache, self.plan)
