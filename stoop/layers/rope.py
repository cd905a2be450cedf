"""Rotary tables: cos and sin of every position, for each kind of scaling."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stoop.ops.rope import Rotation

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True)
class RopeSpec:
    """How positions become rotations; `kind` says which of the other fields apply."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # yarn: scales cos and sin
    truncate: bool = True
    factors: tuple[float, ...] = ()  # explicit divisors of the inverse frequencies


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] float32 on the CPU; computed in float32, as the checkpoints were trained."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "factors":
        return base / torch.tensor(spec.factors, dtype=torch.float32)
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "yarn":
        return _yarn(spec, base, head_dim)
    return base


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those in between."""
    wavelength = 2 * math.pi / base
    longest = spec.original_max_position / spec.low_freq_factor
    shortest = spec.original_max_position / spec.high_freq_factor
    stretched = torch.where(wavelength > longest, base / spec.factor, base)
    keep = (spec.original_max_position / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - keep) * stretched / spec.factor + keep * stretched
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, stretched)


def _yarn(spec: RopeSpec, base: Tensor, head_dim: int) -> Tensor:
    """Ramp over the dimensions from unchanged frequencies to ones divided by `factor`."""

    def dimension(rotations: float) -> float:
        """The dimension that makes this many rotations over the original length."""
        ratio = spec.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    interpolate = ramp.clamp(0, 1)
    return base / spec.factor * interpolate + base * (1 - interpolate)


class RotaryTable:
    """cos and sin by position, computed once on the device and shared by all layers.

    rotary_dim: the dimensions of a head that are rotated, the first ones: all, some or none
    """

    def __init__(
        self,
        spec: RopeSpec,
        rotary_dim: int,
        num_positions: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        frequencies = inverse_frequencies(spec, rotary_dim)
        angles = torch.arange(num_positions).float()[:, None] * frequencies[None, :]
        table = torch.stack((angles.cos(), angles.sin())) * spec.attention_factor
        self.table = table.to(device=device, dtype=dtype)  # [2, num_positions, rotary_dim / 2]

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of [tokens] positions."""
        return Rotation(self.table, positions)
