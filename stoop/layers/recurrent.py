"""Recurrent mixers: short convolutions, gated delta nets and Mamba-2.

Each projects its input, runs over the request's text with a state by slot (ops/recurrent.py), and
adds its output to the residual stream.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.core.state import RecurrentState, TensorSpec
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm
from stoop.layers.stateful import ForwardContext, StatefulLayer
from stoop.layers.weights import WeightView, empty_parameter, prefixed, vector_view
from stoop.ops.causal_conv import ConvState, causal_conv, gated_conv
from stoop.ops.delta_net import DeltaGates, DeltaState, DeltaWeights, delta_net
from stoop.ops.kernels.choice import (
    CONV_WIDTHS,
    DELTA_CHUNK,
    LEAST_DELTA_DIM,
    serves_delta_dim,
)
from stoop.ops.mamba import MambaState, MambaWeights, gated_norm, mamba
from stoop.ops.recurrent import RecurrentRows

Tensors = dict[str, Tensor]
# Scans of prompts count the elements from a tensor's or a row's first token with 32 bits.
MOST_ELEMENTS = 2**31 - 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """States are sums over a whole text: they are kept in float32 or better."""
    return dtype if dtype == torch.float64 else torch.float32


class _Mixer(StatefulLayer):
    """What recurrent mixers share: a convolution, and projections before and after."""

    in_proj: FusedLinear
    out_proj: FusedLinear

    def __init__(self, num_channels: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.num_channels, self.width = num_channels, width
        self.conv_weight = empty_parameter(num_channels, 1, width)
        self.conv_bias = empty_parameter(num_channels) if bias else None

    def forward(
        self, x: Tensor, norm: RMSNorm, stream: Tensor, ctx: ForwardContext, keep: bool = False
    ) -> Tensor:
        """Add the mixer's output for `x`, normalised by `norm`, to the stream.

        keep: the caller still needs the input stream, so it must not be overwritten
        """
        out = ctx.run(self, self.in_proj.of_norm(x, norm))
        return self.out_proj.onto(out, stream, keep=keep, prefetch_weight=True)

    def branch(self, x: Tensor, norm: RMSNorm, ctx: ForwardContext) -> Tensor:
        """The output alone, for families that scale it."""
        return self.out_proj(ctx.run(self, self.in_proj.of_norm(x, norm)))

    def empty_output(self, projected: Tensor) -> Tensor:
        return projected.new_empty(projected.shape[0], self.out_proj.num_inputs)

    @property
    def unserved(self) -> str | None:
        if self.width in CONV_WIDTHS:
            return None
        widths = f"{CONV_WIDTHS[0]} to {CONV_WIDTHS[-1]}"
        return f"convolutions of width {self.width}, and the GPU kernels serve widths of {widths}"

    @property
    def _conv_tensors(self) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
        dtype = _name(self.conv_weight.dtype)
        window = TensorSpec((self.width - 1, self.num_channels), dtype)
        return {"window": window}, {"window_log": TensorSpec((self.num_channels,), dtype)}

    @staticmethod
    def _conv_state(state: Tensors) -> ConvState:
        return ConvState(state["window"], state["window_log"])

    def _conv_views(self, name: str) -> Iterator[WeightView]:
        yield vector_view(f"{name}.weight", self.conv_weight)
        if self.conv_bias is not None:
            yield vector_view(f"{name}.bias", self.conv_bias)


class ShortConv(_Mixer):
    """LFM2's gated short convolution: out_proj(C * conv(B * x))."""

    def __init__(self, hidden_size: int, width: int, *, bias: bool) -> None:
        super().__init__(hidden_size, width, bias=bias)
        self.in_proj = FusedLinear(("in_proj",), hidden_size, (3 * hidden_size,), bias)
        self.out_proj = FusedLinear(("out_proj",), hidden_size, (hidden_size,), bias)

    @property
    def state(self) -> RecurrentState:
        return RecurrentState(*self._conv_tensors)

    def core(self, state: Tensors, rows: RecurrentRows, bcx: Tensor) -> Tensor:
        conv = self._conv_state(state)
        return gated_conv(bcx, self.conv_weight, self.conv_bias, rows, conv)

    def weight_views(self) -> Iterator[WeightView]:
        yield from self._conv_views("conv")
        yield from self.in_proj.weight_views()
        yield from self.out_proj.weight_views()


@dataclass(frozen=True)
class DeltaNetShape:
    hidden_size: int
    num_key_heads: int
    num_value_heads: int  # value head i uses key head i // (value heads / key heads)
    key_dim: int
    value_dim: int
    conv_width: int
    eps: float


class DeltaNet(_Mixer):
    """The gated delta net of Qwen3.5."""

    def __init__(self, shape: DeltaNetShape) -> None:
        self.keys = shape.num_key_heads * shape.key_dim
        self.values = shape.num_value_heads * shape.value_dim
        super().__init__(2 * self.keys + self.values, shape.conv_width, bias=False)
        self.shape = shape
        heads = shape.num_value_heads
        self.in_proj = FusedLinear(
            ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            shape.hidden_size,
            (self.num_channels, self.values, heads, heads),
            bias=False,
        )
        self.out_proj = FusedLinear(("out_proj",), self.values, (shape.hidden_size,), bias=False)
        self.a_log = empty_parameter(heads, wide=True)
        self.dt_bias = empty_parameter(heads, wide=True)
        self.norm = RMSNorm(shape.value_dim, shape.eps)

    @property
    def state(self) -> RecurrentState:
        shape, wide = self.shape, _name(_wide(self.conv_weight.dtype))
        tensors, logs = self._conv_tensors
        matrix = (shape.num_value_heads, shape.key_dim, shape.value_dim)
        tensors["matrix"] = TensorSpec(matrix, wide)
        logs["key_log"] = TensorSpec((shape.num_key_heads, shape.key_dim), wide)
        logs["update_log"] = TensorSpec((shape.num_value_heads, shape.value_dim), wide)
        logs["decay_log"] = TensorSpec((shape.num_value_heads,), wide)
        return RecurrentState(tensors, logs)

    @property
    def unserved(self) -> str | None:
        sizes = self.shape.key_dim, self.shape.value_dim
        if all(map(serves_delta_dim, sizes)):
            return super().unserved
        return (
            f"delta nets whose heads have keys of {sizes[0]} and values of {sizes[1]}, and the GPU "
            f"kernels serve powers of two from {LEAST_DELTA_DIM} on"
        )

    @property
    def most_tokens(self) -> int:
        shape = self.shape
        head = max(shape.key_dim, shape.value_dim, DELTA_CHUNK)  # of what kernels hand on
        return MOST_ELEMENTS // max(self.num_channels, shape.num_value_heads * head)

    def core(self, state: Tensors, rows: RecurrentRows, projected: Tensor) -> Tensor:
        heads = self.shape.num_value_heads
        x, *gates = projected.split((self.num_channels, self.values, heads, heads), dim=1)
        qkv = causal_conv(x, self.conv_weight, self.conv_bias, rows, self._conv_state(state))
        norm = self.norm
        weights = DeltaWeights(self.a_log, self.dt_bias, norm.weight, norm.eps, norm.packed)
        names = ("matrix", "key_log", "update_log", "decay_log")
        kept = DeltaState(*(state[name] for name in names))
        return delta_net(qkv, DeltaGates(*gates), weights, rows, kept)

    def weight_views(self) -> Iterator[WeightView]:
        yield from self._conv_views("conv1d")
        yield from self.in_proj.weight_views()
        yield from self.out_proj.weight_views()
        yield vector_view("A_log", self.a_log)
        yield vector_view("dt_bias", self.dt_bias)
        yield from prefixed("norm", self.norm.weight_views())


@dataclass(frozen=True)
class Mamba2Shape:
    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int  # of B and C; head i uses group i // (heads / groups)
    conv_width: int
    eps: float
    conv_bias: bool = True
    proj_bias: bool = False
    norm_groups: int = 1  # the gated norm is over inner_size / norm_groups values
    dt_min: float = 0.0
    dt_max: float = float("inf")

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim


class Mamba2(_Mixer):
    """Mamba-2: one matrix projects to the gate, x, B, C and the time steps."""

    def __init__(self, shape: Mamba2Shape) -> None:
        inner, groups = shape.inner_size, shape.num_groups * shape.state_size
        super().__init__(inner + 2 * groups, shape.conv_width, bias=shape.conv_bias)
        self.shape = shape
        self.sizes = (inner, self.num_channels, shape.num_heads)  # gate, x B C, time steps
        self.in_proj = FusedLinear(
            ("in_proj",), shape.hidden_size, (sum(self.sizes),), shape.proj_bias
        )
        self.out_proj = FusedLinear(("out_proj",), inner, (shape.hidden_size,), shape.proj_bias)
        heads = shape.num_heads
        self.a_log = empty_parameter(heads, wide=True)
        self.dt_bias = empty_parameter(heads, wide=True)
        self.d = empty_parameter(heads, wide=True)
        self.norm = RMSNorm(inner, shape.eps)

    @property
    def state(self) -> RecurrentState:
        shape, wide = self.shape, _name(_wide(self.conv_weight.dtype))
        tensors, logs = self._conv_tensors
        matrix = (shape.num_heads, shape.head_dim, shape.state_size)
        tensors["matrix"] = TensorSpec(matrix, wide)
        logs["input_log"] = TensorSpec((shape.num_heads, shape.head_dim), wide)
        # Rings, with places for two steps.
        logs["b_log"] = TensorSpec((2, shape.num_groups, shape.state_size), wide)
        logs["decay_log"] = TensorSpec((2, shape.num_heads), wide)
        return RecurrentState(tensors, logs)

    @property
    def most_tokens(self) -> int:
        return MOST_ELEMENTS // self.num_channels

    def core(self, state: Tensors, rows: RecurrentRows, projected: Tensor) -> Tensor:
        gate, x, dt = projected.split(self.sizes, dim=1)
        xbc = causal_conv(x, self.conv_weight, self.conv_bias, rows, self._conv_state(state))
        limits = (self.shape.dt_min, self.shape.dt_max)
        weights = MambaWeights(self.a_log, self.dt_bias, self.d, *limits, self.norm.packed)
        names = ("matrix", "input_log", "b_log", "decay_log")
        y = mamba(xbc, dt, weights, rows, MambaState(*(state[name] for name in names)))
        return gated_norm(y, gate, self.norm.weight, self.norm.eps, self.shape.norm_groups)

    def weight_views(self) -> Iterator[WeightView]:
        yield from self._conv_views("conv1d")
        yield from self.in_proj.weight_views()
        yield from self.out_proj.weight_views()
        yield vector_view("A_log", self.a_log)
        yield vector_view("D", self.d)
        yield vector_view("dt_bias", self.dt_bias)
        yield from prefixed("norm", self.norm.weight_views())
