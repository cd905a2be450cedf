"""Packed schemes: matrices that keep the few bits of a quantised checkpoint, for CPUs.

A matrix is cut into tiles of 16 outputs and groups of 16 or 32 inputs. A group of a tile has its
codes, then a scale for each output, then a minimum for each output if the format has minima; a
weight is scale * code + minimum. ops/native/src/packed.h has the layout and the kernels, which
round inputs to 16 or 8 bits, 32 to a scale, and add up in float32. Each row of a product is
computed the same way whatever the number of rows, so a text does not depend on what else is in a
batch, or on drafts.

GGUF's types are repacked without loss. Matrices of a draft head are rounded to Q8_0.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.core.quantized import QuantizedRows
from stoop.ops.native import calls
from stoop.ops.native.library import find_native
from stoop.ops.norm import rms_norm, silu_and_mul
from stoop.ops.weight import Scheme, Weight

TILE = 16  # outputs of a tile
TAKEN_AT_ONCE = 4096  # rows to unpack together, which may be in as many tiles


@dataclass(frozen=True)
class Groups:
    """A quantised matrix taken apart: a weight is scale * code + minimum."""

    codes: Tensor  # [outputs, inputs] int8
    scales: Tensor  # [outputs, groups]
    minima: Tensor | None  # [outputs, groups]

    def to_float(self) -> Tensor:
        outputs, num_groups = self.scales.shape
        codes = self.codes.view(outputs, num_groups, -1).float()
        values = codes * self.scales.float()[..., None]
        if self.minima is not None:
            values += self.minima.float()[..., None]
        return values.view(outputs, -1)

    def regrouped(self, size: int) -> "Groups":
        """The same values in smaller groups, with scales and minima in float32."""
        times = self.codes.shape[1] // self.scales.shape[1] // size
        scales = self.scales.float().repeat_interleave(times, dim=1)
        if self.minima is None:
            return Groups(self.codes, scales, torch.zeros_like(scales))
        return Groups(self.codes, scales, self.minima.float().repeat_interleave(times, dim=1))


class Packed(Scheme):
    """One packed format. number: of the format in the kernels

    input_bits: what inputs of products are rounded to, 16 or 8 (`with_input_bits`)
    """

    input_bits = 16

    def __init__(
        self,
        name: str,
        number: int,
        *,
        bits: int,
        group: int,
        scale_dtype: torch.dtype,
        has_minima: bool,
        lowest: int,
    ) -> None:
        """lowest: the code that 4 bits of zeros stand for"""
        self.name, self.number = name, number
        self.bits, self.group, self.lowest = bits, group, lowest
        self.scale_dtype, self.has_minima = scale_dtype, has_minima
        self.code_bytes = TILE * group * bits // 8
        self.scale_bytes = TILE * scale_dtype.itemsize
        self.group_bytes = self.code_bytes + self.scale_bytes * (2 if has_minima else 1)

    def __repr__(self) -> str:
        inputs = "" if self.input_bits == 16 else f", {self.input_bits}-bit inputs"
        return f"<packed {self.name}{inputs}>"

    def fits(self, output_sizes: Sequence[int], num_inputs: int) -> bool:
        """Whether matrices of these sizes, one below the other, can be packed."""
        return num_inputs % 32 == 0 and all(size % TILE == 0 for size in output_sizes)

    # ---- loading ----

    def empty(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Weight:
        assert self.fits([num_outputs], num_inputs), (num_outputs, num_inputs)
        shape = (num_outputs // TILE, num_inputs // self.group, self.group_bytes)
        return Weight(torch.empty(shape, dtype=torch.uint8), None, self)

    def shape(self, weight: Weight) -> tuple[int, ...]:
        num_tiles, num_groups, _ = weight.data.shape
        return num_tiles * TILE, num_groups * self.group

    def rows(self, weight: Weight, start: int, count: int) -> Weight:
        assert start % TILE == 0 and count % TILE == 0, (start, count)
        return weight._replace(data=weight.data[start // TILE : (start + count) // TILE])

    def take(self, weight: Weight, rows: Tensor) -> Weight:
        """Unpack the tiles that have these rows, some rows at a time, and pack the rows again."""
        assert len(rows) % TILE == 0, len(rows)
        parts = [self.pack(self._unpack_rows(weight, part)) for part in rows.split(TAKEN_AT_ONCE)]
        return Weight(torch.cat(parts), None, self)

    def _unpack_rows(self, weight: Weight, rows: Tensor) -> Groups:
        tiles, place = (rows // TILE).unique(return_inverse=True)
        groups = self.unpack(weight._replace(data=weight.data[tiles]))
        within = place * TILE + rows % TILE
        minima = None if groups.minima is None else groups.minima[within]
        return Groups(groups.codes[within], groups.scales[within], minima)

    def store(self, weight: Weight, values: Tensor | QuantizedRows) -> None:
        if isinstance(values, QuantizedRows) and self.name in (values.kind, WIDE.name):
            groups = take_apart(values)
        else:  # of a draft head
            assert self.name == Q8_0.name, f"other values are packed as Q8_0, not as {self.name}"
            found = take_apart(values).to_float() if isinstance(values, QuantizedRows) else values
            groups = round_to_8_bits(found)
        weight.data.copy_(self.pack(groups))

    def pack(self, groups: Groups) -> Tensor:
        """[tiles, groups, group_bytes] uint8"""
        if self.name == WIDE.name:
            groups = groups.regrouped(self.group)
        outputs, inputs = groups.codes.shape
        num_tiles, num_groups = outputs // TILE, inputs // self.group
        assert groups.scales.shape == (outputs, num_groups), (groups.scales.shape, self)
        assert (groups.minima is not None) == self.has_minima, self
        codes = groups.codes.view(num_tiles, TILE, num_groups, self.group)
        if self.bits == 4:
            # A word has inputs 0, 2, 4, 6, then 1, 3, 5, 7, four bits each.
            eights = (codes - self.lowest).view(torch.uint8).view(*codes.shape[:3], -1, 2, 2, 2)
            eights = eights.movedim(-1, 3)  # [..., odd, eights, byte, half of a byte]
            words = eights[..., 0] | eights[..., 1] << 4
            words = words.movedim(3, 4).flatten(-2)  # [tiles, outputs, groups, eights, bytes]
            parts = [words.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_groups, -1)]
        else:
            pairs = codes.view(torch.uint8).view(*codes.shape[:3], -1, 2)
            parts = [pairs.permute(0, 2, 3, 1, 4).reshape(num_tiles, num_groups, -1)]
        for numbers in (groups.scales, groups.minima):
            if numbers is not None:
                by_tile = numbers.to(self.scale_dtype).view(num_tiles, TILE, num_groups)
                parts.append(by_tile.transpose(1, 2).contiguous().view(torch.uint8))
        return torch.cat(parts, dim=-1)

    def unpack(self, weight: Weight) -> Groups:
        """Undo `pack`."""
        data = weight.data
        num_tiles, num_groups, _ = data.shape
        codes, *numbers = data.split(
            [self.code_bytes] + [self.scale_bytes] * (2 if self.has_minima else 1), dim=-1
        )
        if self.bits == 4:
            words = codes.reshape(num_tiles, num_groups, -1, TILE, 2, 2)  # [..., odd, byte]
            eights = torch.stack((words & 15, words >> 4), dim=-1)  # [..., odd, byte, half]
            eights = eights.permute(0, 3, 1, 2, 5, 6, 4)  # [tiles, outputs, groups, eights, ...]
            values = eights.reshape(num_tiles * TILE, -1).view(torch.int8) + self.lowest
        else:
            pairs = codes.reshape(num_tiles, num_groups, -1, TILE, 2)
            by_output = pairs.permute(0, 3, 1, 2, 4).reshape(num_tiles * TILE, -1)
            values = by_output.view(torch.int8)
        scales, minima = [
            each.contiguous().view(self.scale_dtype).transpose(1, 2).reshape(-1, num_groups)
            for each in numbers
        ] + ([] if self.has_minima else [None])
        return Groups(values, scales, minima)

    def dequantize(self, weight: Weight) -> Tensor:
        """The matrix [outputs, inputs] in float32."""
        return self.unpack(weight).to_float()

    # ---- products ----

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self._product(x, weight, bias)

    def embed(self, token_ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        if dtype != torch.float32 or find_native() is None:
            return F.embedding(token_ids, self.dequantize(weight).to(dtype))
        out = torch.empty(token_ids.shape[0], self.shape(weight)[1], dtype=torch.float32)
        calls.packed_rows(token_ids, weight.data, self.number, out)
        return out

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        return self._product(x, weight, bias, norm_weight, eps)

    def norm_linear_silu(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        num_outputs = self.shape(weight)[0]
        if num_outputs % (2 * TILE):
            return silu_and_mul(self._product(x, weight, bias, norm_weight, eps))
        return self._product(x, weight, bias, norm_weight, eps, gated=True)

    def _product(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
    ) -> Tensor:
        if x.dtype != torch.float32 or find_native() is None:
            return self._reference(x, weight, bias, norm, eps, gated)
        num_outputs = self.shape(weight)[0] // (2 if gated else 1)
        out = x.new_empty(x.shape[0], num_outputs)
        numbers = (self.number, self.input_bits)
        calls.packed_product(x, weight.data, bias, norm, eps, *numbers, gated, out)
        return out

    def _reference(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        norm: Tensor | None,
        eps: float,
        gated: bool,
    ) -> Tensor:
        """The slow twin: dequantises the whole matrix."""
        if norm is not None:
            x = rms_norm(x, norm, eps)
        out = F.linear(x, self.dequantize(weight).to(x.dtype), bias)
        return silu_and_mul(out) if gated else out


Q4_1 = Packed("Q4_1", 0, bits=4, group=32, scale_dtype=torch.float16, has_minima=True, lowest=0)
Q4_0 = Packed("Q4_0", 1, bits=4, group=32, scale_dtype=torch.float16, has_minima=False, lowest=-8)
Q8_0 = Packed("Q8_0", 2, bits=8, group=32, scale_dtype=torch.float16, has_minima=False, lowest=0)
Q4_K = Packed("Q4_K", 3, bits=4, group=32, scale_dtype=torch.float32, has_minima=True, lowest=0)
Q6_K = Packed("Q6_K", 4, bits=8, group=16, scale_dtype=torch.float32, has_minima=False, lowest=0)
# Holds any of the others, for matrices that are stacked into one.
WIDE = Packed("wide", 5, bits=8, group=16, scale_dtype=torch.float32, has_minima=True, lowest=0)


@functools.cache
def with_input_bits(scheme: Packed, bits: int) -> Packed:
    """The same format for products whose inputs are rounded to so many bits."""
    assert bits in (16, 8), bits
    if bits == scheme.input_bits:
        return scheme
    other = copy.copy(scheme)
    other.input_bits = bits
    return other


FORMATS = {each.name: each for each in (Q4_1, Q4_0, Q8_0, Q4_K, Q6_K)}  # by GGUF's names


def common_format(kinds: Sequence[str]) -> Packed | None:
    """The format of matrices of these GGUF types, one below the other; None if one has none."""
    if not kinds or any(kind not in FORMATS for kind in kinds):
        return None
    first, *others = dict.fromkeys(kinds)
    return WIDE if others else FORMATS[first]


# ---- GGUF's types, taken apart. raw: [outputs, blocks, bytes of a block] uint8 ----


def take_apart(rows: QuantizedRows) -> Groups:
    raw = rows.data.view(rows.data.shape[0], -1, rows.block_bytes)
    groups = _READERS[rows.kind](raw)
    codes = groups.codes.reshape(raw.shape[0], -1)
    scales = groups.scales.reshape(raw.shape[0], -1)
    minima = None if groups.minima is None else groups.minima.reshape(raw.shape[0], -1)
    return Groups(codes, scales, minima)


def _halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    """Low halves of all bytes, then high halves."""
    return torch.cat((raw & 15, raw >> 4), dim=-1).view(torch.int8)


def _read_q4_1(raw: Tensor) -> Groups:
    return Groups(_nibbles(raw[..., 4:]), _halves(raw[..., :2]), _halves(raw[..., 2:4]))


def _read_q4_0(raw: Tensor) -> Groups:
    return Groups(_nibbles(raw[..., 2:]) - 8, _halves(raw[..., :2]), None)


def _read_q8_0(raw: Tensor) -> Groups:
    return Groups(raw[..., 2:].contiguous().view(torch.int8), _halves(raw[..., :2]), None)


def _read_q4_k(raw: Tensor) -> Groups:
    """Blocks of 256: eight groups whose 6-bit scales and minima multiply two numbers."""
    scale, least = _halves(raw[..., :2]).float(), _halves(raw[..., 2:4]).float()
    first, second, third = raw[..., 4:16].split(4, dim=-1)
    low, high = third & 15, third >> 4
    scales = torch.cat((first & 63, low | (first >> 6) << 4), dim=-1)
    minima = torch.cat((second & 63, high | (second >> 6) << 4), dim=-1)
    codes = _nibbles(raw[..., 16:].unflatten(-1, (4, 32)))  # [..., 4, 64]
    return Groups(codes, scale * scales.float(), -(least * minima.float()))


def _read_q6_k(raw: Tensor) -> Groups:
    """Blocks of 256: sixteen groups, codes of 4 + 2 bits, 8-bit scales that multiply a number."""
    lows, highs, scales, scale = raw.split((128, 64, 16, 2), dim=-1)
    low = _nibbles(lows.unflatten(-1, (2, 64))).view(torch.uint8)  # [..., 2, 128]
    high = highs.unflatten(-1, (2, 32))
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)  # [..., 2, 128]
    codes = (low | high << 4).view(torch.int8) - 32
    return Groups(
        codes, _halves(scale).float() * scales.contiguous().view(torch.int8).float(), None
    )


_READERS = {
    "Q4_1": _read_q4_1,
    "Q4_0": _read_q4_0,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
    "Q6_K": _read_q6_k,
}


def round_to_8_bits(values: Tensor) -> Groups:
    """A dense matrix in groups of 32 codes from -127 to 127."""
    outputs = values.shape[0]
    grouped = values.float().reshape(outputs, -1, 32)
    scales = (grouped.abs().amax(dim=-1) / 127).half()
    divisor = scales.float().masked_fill(scales == 0, 1.0)[..., None]
    codes = (grouped / divisor).round_().clamp_(-127, 127).to(torch.int8)
    return Groups(codes.reshape(outputs, -1), scales, None)
