"""The lookup of embeddings, which opens a pass over the layers."""

import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.launch import let_next_start, overlapping, wait_for_inputs
from stoop.ops.library import register

BLOCK = 1024


@triton.jit
def _embed_kernel(token_ids_ptr, table_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """In this order: kernels behind it read, before they wait, what was there before it."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token_id * size + column, mask=column < size, other=0.0)
    tl.store(out_ptr + row * size + column, x, mask=column < size)


@register("embed_(Tensor token_ids, Tensor table, Tensor(a!) out) -> ()")
def embed_(token_ids: Tensor, table: Tensor, out: Tensor) -> None:
    tokens, size = out.shape
    assert table.is_contiguous() and out.is_contiguous() and token_ids.is_contiguous()
    _embed_kernel[(tokens, triton.cdiv(size, BLOCK))](
        token_ids, table, out, size, BLOCK=BLOCK, num_warps=4, **overlapping(out)
    )


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    out = table.new_empty(token_ids.shape[0], table.shape[1])
    embed_(token_ids, table, out)
    return out
