"""All layers of a Llama-like decoder in one call of the CPU kernels, where they serve them.

The slow twin is the loop over layers in `DecoderModel.forward` and `EagleHead.forward`; both use
the same kernels for each part, so their results are equal bit for bit.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoop.core.state import PagedState
from stoop.layers.attention import Attention
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm
from stoop.layers.stateful import ForwardContext, StateContext
from stoop.ops.kv_store import NO_SCALES
from stoop.ops.library import register
from stoop.ops.native import library as structs
from stoop.ops.native.calls import BatchRows, as_matrix, native
from stoop.ops.packed import Packed
from stoop.ops.rope import Rotation


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer. input_norm: None if the layer is given what it attends over"""

    input_norm: RMSNorm | None
    attention: Attention
    post_norm: RMSNorm
    gate_up: FusedLinear
    down: FusedLinear

    @property
    def products(self) -> tuple[FusedLinear, ...]:
        return (self.attention.qkv_proj, self.attention.o_proj, self.gate_up, self.down)


def fuse(layers: Sequence[LayerParts] | None) -> "FusedLayers | None":
    """None: layers that are not all known, or that the kernels do not serve."""
    return FusedLayers(layers) if layers and can_fuse(layers) else None


def can_fuse(layers: Sequence[LayerParts]) -> bool:
    """Whether the kernels have everything that these layers need."""
    products = [product for layer in layers for product in layer.products]
    return (
        all(isinstance(product.scheme, Packed) for product in products)
        and all(layer.post_norm.weight.dtype == torch.float32 for layer in layers)
        and all(sum(layer.gate_up.out_sizes) % 32 == 0 for layer in layers)
        and len({_sizes(layer) for layer in layers}) == 1
    )


def _sizes(layer: LayerParts) -> tuple[int, ...]:
    shape = layer.attention.shape
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, layer.down.num_inputs


class _Opened(NamedTuple):
    """What a context holds for these layers."""

    caches: list[Tensor]
    rows: list[Tensor]  # KV slots of the tokens, then `BatchRows`


class FusedLayers:
    """The layers as structures of the library. They hold addresses: weights must stay in place."""

    def __init__(self, layers: Sequence[LayerParts]) -> None:
        assert can_fuse(layers)
        self.layers = layers
        self.hidden_size = layers[0].post_norm.weight.shape[0]
        self.intermediate_size = layers[0].down.num_inputs
        self._structs: Any = (structs.Layer * len(layers))(*map(_layer_struct, layers))
        self._caches: list[tuple[int, int, int]] = []
        self.handle = id(self)
        _FUSED[self.handle] = self

    def run(
        self,
        ctx: ForwardContext,
        stream: Tensor,
        rotation: Rotation,
        taps: Sequence[int] = (),
        given: Tensor | None = None,
    ) -> list[Tensor] | None:
        """Add all layers to the stream [tokens, hidden_size], in place.

        Returns the streams as they entered the layers `taps`; None, with nothing done, if the
        context or the states are not what the kernels take.
        given: [tokens, n], what the first layer attends over
        """
        found = self._open(ctx, stream)
        if found is None:
            return None
        inner = [tap for tap in taps if tap < len(self.layers)]
        tapped = stream.new_empty(len(inner), *stream.shape)
        inputs = [rotation.table, rotation.positions, *found.rows]
        native_layers(stream, given, inputs, found.caches, tapped, inner, self.handle)
        by_layer = dict(zip(inner, tapped, strict=True)) | {len(self.layers): stream}
        return [by_layer[tap] for tap in taps]

    def run_for(
        self,
        wanted: Tensor,
        ctx: ForwardContext,
        stream: Tensor,
        rotation: Rotation,
        given: Tensor | None = None,
    ) -> Tensor | None:
        """As `run`, for the tokens `wanted` only; returns their stream as it leaves the last layer.

        That layer stores the keys and values of all tokens, and computes nothing else of the rest.
        wanted: [n] int64, in any order, some of them repeatedly
        """
        found = self._open(ctx, stream)
        if found is None:
            return None
        out = stream.new_empty(wanted.shape[0], stream.shape[1])
        inputs = [rotation.table, rotation.positions, *found.rows]
        # Layers before the last one change the stream, which is the caller's.
        native_layers(stream.clone(), given, inputs, found.caches, out, [], self.handle, wanted)
        return out

    def _open(self, ctx: ForwardContext, stream: Tensor) -> "_Opened | None":
        if not isinstance(ctx, StateContext) or stream.dtype != torch.float32:
            return None
        metadata = ctx.metadata[PagedState]
        if not isinstance(metadata.plan, BatchRows):
            return None
        caches = [ctx.states[layer.attention.index] for layer in self.layers]
        if any(layer.attention.kv_scales != NO_SCALES for layer in self.layers):
            return None
        if caches[0].dtype != torch.float32:
            return None
        return _Opened(caches, [metadata.slot_mapping, *metadata.plan])

    def prepare(self, caches: Sequence[Tensor], tapped: Tensor, taps: Sequence[int]) -> Any:
        """The structures, pointing to these caches and to rows of `tapped`."""
        # Another cache may lie where one was freed.
        places = [(each.data_ptr(), each.stride(0), each.shape[2]) for each in caches]
        if places != self._caches:
            for each, place in zip(self._structs, places, strict=True):
                each.cache, each.cache_part, each.heads.block_size = place
            self._caches = places
        for each in self._structs:
            each.tap = None
        for row, layer in enumerate(taps):
            self._structs[layer].tap = tapped[row].data_ptr()
        return self._structs


# An operation cannot take Python objects, so it takes a key.
_FUSED: "weakref.WeakValueDictionary[int, FusedLayers]" = weakref.WeakValueDictionary()


@register(
    "native_layers(Tensor(a!) stream, Tensor? given, Tensor[] inputs, Tensor(b!)[] caches, "
    "Tensor(c!) out, int[] taps, int handle, Tensor? wanted=None) -> ()"
)
def native_layers(
    stream: Tensor,
    given: Tensor | None,
    inputs: list[Tensor],
    caches: list[Tensor],
    out: Tensor,
    taps: list[int],
    handle: int,
    wanted: Tensor | None = None,
) -> None:
    """See `FusedLayers.run` and `run_for`.

    inputs: a rotary table [2, positions, head_dim / 2], positions and KV slots of the tokens, then
    `BatchRows`; out: [taps, tokens, hidden_size], or [wanted tokens, hidden_size]
    """
    fused, library = _FUSED[handle], native()
    if given is not None:
        given = given.contiguous()
    count = 0 if wanted is None else wanted.shape[0]
    assert wanted is None or wanted.is_contiguous(), wanted.stride()
    table, positions, slot_mapping, *rows = inputs
    batch = BatchRows(*rows).as_batch(stream.shape[0], slot_mapping, positions)
    layers = fused.prepare(caches, out, taps)
    cos = table.data_ptr()
    stack = structs.Stack(
        ctypes.addressof(layers),
        len(layers),
        fused.hidden_size,
        fused.intermediate_size,
        cos,
        cos + table.stride(0) * table.element_size(),
        stream.shape[1],
    )
    some = structs.Wanted(structs.address(wanted), count, out.data_ptr())
    library.layers(
        library.team,
        ctypes.addressof(stack),
        ctypes.addressof(batch),
        stream.data_ptr(),
        structs.address(given),
        0 if given is None else given.shape[1],
        ctypes.addressof(some),
    )


def _layer_struct(layer: LayerParts) -> structs.Layer:
    attention, shape = layer.attention, layer.attention.shape
    norms = attention.head_norms
    return structs.Layer(
        input_norm=None if layer.input_norm is None else layer.input_norm.weight.data_ptr(),
        post_norm=layer.post_norm.weight.data_ptr(),
        qkv=_matrix(attention.qkv_proj),
        o=_matrix(attention.o_proj),
        gate_up=_matrix(layer.gate_up),
        down=_matrix(layer.down),
        qkv_bias=structs.address(attention.qkv_proj.bias),
        o_bias=structs.address(attention.o_proj.bias),
        gate_up_bias=structs.address(layer.gate_up.bias),
        down_bias=structs.address(layer.down.bias),
        head_norms=structs.HeadNorms()
        if norms is None
        else structs.HeadNorms(norms.q.data_ptr(), norms.k.data_ptr(), norms.eps),
        heads=structs.Heads(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, 0, shape.window or 0, shape.scale
        ),
        eps=layer.post_norm.eps,
    )


def _matrix(layer: FusedLinear) -> structs.Matrix:
    scheme = layer.scheme
    assert isinstance(scheme, Packed)
    return as_matrix(layer.matrix.data, scheme.number, layer.num_inputs, scheme.input_bits)
