"""Calls of the library as operations of torch, which the tape and the sanitizer see."""

from ctypes import addressof, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from stoop.ops.library import register
from stoop.ops.native.library import Batch as BatchStruct
from stoop.ops.native.library import Heads, Matrix, Native, address, find_native

TILE = 16


def native() -> Native:
    found = find_native()
    assert found is not None, "no CPU kernels here: ask find_native first"
    return found


def as_matrix(data: Tensor, number: int, num_inputs: int, input_bits: int = 16) -> Matrix:
    """data: [tiles, groups, group_bytes]; number: of the format; input_bits: of products' inputs"""
    num_tiles, num_groups, group_bytes = data.shape
    assert data.is_contiguous()
    tile_bytes = num_groups * group_bytes
    return Matrix(data.data_ptr(), num_tiles * TILE, num_inputs, number, tile_bytes, input_bits)


@register(
    "packed_product(Tensor x, Tensor data, Tensor? bias, Tensor? norm, float eps, int format, "
    "int input_bits, bool gated, Tensor(a!) out) -> ()"
)
def packed_product(  # noqa: PLR0913
    x: Tensor,
    data: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    format: int,
    input_bits: int,
    gated: bool,
    out: Tensor,
) -> None:
    """x @ matrix.T + bias, of rms_norm(x) if there is a norm.

    gated: silu of the first half of the outputs, times the second half
    """
    library = native()
    if x.stride(1) != 1:
        x = x.contiguous()
    matrix = as_matrix(data, format, x.shape[1], input_bits)
    library.product(
        library.team,
        addressof(matrix),
        address(bias),
        x.data_ptr(),
        x.stride(0),
        address(norm),
        eps,
        x.shape[0],
        out.data_ptr(),
        out.stride(0),
        gated,
    )


@register("packed_rows(Tensor ids, Tensor data, int format, Tensor(a!) out) -> ()")
def packed_rows(ids: Tensor, data: Tensor, format: int, out: Tensor) -> None:
    """Rows of a matrix in float32. ids: [n]; out: [n, inputs]"""
    ids = ids.to(torch.int64).contiguous()
    matrix = as_matrix(data, format, out.shape[1])
    native().rows(addressof(matrix), ids.data_ptr(), ids.shape[0], out.data_ptr())


class BatchRows(NamedTuple):
    """What attention reads of a batch's rows; all of it when it runs."""

    query_start_loc: Tensor  # [num_reqs + 1] int32
    context_lens: Tensor  # [num_reqs] int32
    seq_lens: Tensor  # [num_reqs] int32
    row_slots: Tensor  # [num_reqs] int64
    block_table: Tensor  # [slots + 1, max_blocks] int32

    def as_batch(
        self, num_tokens: int, slot_mapping: Tensor | None = None, positions: Tensor | None = None
    ) -> BatchStruct:
        pointers = [each.data_ptr() for each in self]
        num_reqs, max_blocks = self.row_slots.shape[0], self.block_table.stride(0)
        places = (address(slot_mapping), address(positions))
        return BatchStruct(num_tokens, num_reqs, *pointers, max_blocks, *places)


@register(
    "native_attend(Tensor q, Tensor cache, Tensor[] rows, float scale, int window, "
    "Tensor(a!) out) -> ()"
)
def native_attend(
    q: Tensor, cache: Tensor, rows: list[Tensor], scale: float, window: int, out: Tensor
) -> None:
    """q, out: [tokens, heads, head_dim]; cache: [2, num_blocks, block_size, kv_heads, head_dim]"""
    library = native()
    q = q.contiguous()
    num_tokens, num_heads, head_dim = q.shape
    heads = Heads(num_heads, cache.shape[3], head_dim, cache.shape[2], window, scale)
    batch = BatchRows(*rows).as_batch(num_tokens)
    library.attend(
        library.team,
        addressof(batch),
        addressof(heads),
        q.data_ptr(),
        num_heads * head_dim,
        cache.data_ptr(),
        cache.stride(0),
        out.data_ptr(),
    )


@register("native_norms(Tensor[] parts, Tensor[] weights, float eps, Tensor(a!) out) -> ()")
def native_norms(parts: list[Tensor], weights: list[Tensor], eps: float, out: Tensor) -> None:
    """Parts [tokens, n_i], each normalised by its own weight, side by side in `out`."""
    count = len(parts)
    pointers, numbers = c_void_p * count, c_int64 * count
    sources = pointers(*(each.data_ptr() for each in parts))
    strides = numbers(*(each.stride(0) for each in parts))
    widths = numbers(*(each.shape[1] for each in parts))
    factors = pointers(*(each.data_ptr() for each in weights))
    native().call.stoop_norms(
        addressof(sources),
        addressof(strides),
        addressof(widths),
        addressof(factors),
        count,
        parts[0].shape[0],
        eps,
        out.data_ptr(),
        out.stride(0),
    )
