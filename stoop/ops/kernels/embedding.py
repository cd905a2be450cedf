"""Embedding lookup, the first kernel of a forward pass."""

import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.launch import let_next_start, overlapping, wait_for_inputs
from stoop.ops.library import register

BLOCK = 1024


@triton.jit
def _embed_kernel(token_ids_ptr, table_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Waits before it signals: later kernels read early what was written before this one."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token_id * size + column, mask=column < size, other=0.0)
    tl.store(out_ptr + row * size + column, x, mask=column < size)


@register("embed_(Tensor token_ids, Tensor table, Tensor(a!) out) -> ()")
def embed_(token_ids: Tensor, table: Tensor, out: Tensor) -> None:
    """token_ids: [tokens], table: [vocab_size, n], out: [tokens, n], all contiguous"""
    tokens, size = out.shape
    assert table.is_contiguous() and out.is_contiguous() and token_ids.is_contiguous()
    _embed_kernel[(tokens, triton.cdiv(size, BLOCK))](
        token_ids, table, out, size, BLOCK=BLOCK, num_warps=4, **overlapping(out)
    )


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Look up one row of the table per token; all contiguous."""
    out = table.new_empty(token_ids.shape[0], table.shape[1])
    embed_(token_ids, table, out)
    return out
