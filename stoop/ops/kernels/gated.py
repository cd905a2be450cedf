"""Gate, up and activation for some dozens of tokens in one GEMM.

These are too many tokens to be bound by reading the weights alone, and too few to fill a GPU with
tiles of cuBLAS's sizes. A program computes a band of outputs for all tokens, both gates and ups, so
that the inputs are read once and neither gates nor ups are written to memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.launch import (
    SHARED_FIRST,
    divide_memory,
    let_next_start,
    overlapping,
    prefetch,
    wait_for_inputs,
)
from stoop.ops.kernels.linear_choice import GemmTiling

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _load(ptr, inputs, num_inputs, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(ptr + inputs)
    return tl.load(ptr + inputs, mask=inputs < num_inputs, other=0.0)


@triton.jit
def _load_tokens(ptr, inputs, token_mask, num_inputs, EVEN: tl.constexpr):
    """Load tokens with a mask: if all programs read the last token in place of missing ones, they
    would contend for it."""
    return tl.load(
        ptr + inputs, mask=token_mask if EVEN else token_mask & (inputs < num_inputs), other=0.0
    )


@triton.jit
def _dot(x, weight, acc, WIDE: tl.constexpr):
    if WIDE:
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    return tl.dot(x, weight.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_tokens, num_outputs, num_inputs,
    EVEN: tl.constexpr, BLOCK_T: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS outputs for all tokens."""
    let_next_start(PDL)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Past the end, reading the last row again is cheaper than a mask.
    row = tl.minimum(output, num_outputs - 1).to(tl.int64)
    gate_ptr = weight_ptr + row * num_inputs
    up_ptr = weight_ptr + (row + num_outputs) * num_inputs
    if AHEAD > 0:  # one thread prefetches the start of one row
        lane = tl.arange(0, LANES)
        row_of_lane = tl.minimum(tl.program_id(0) * OUTPUTS + lane % OUTPUTS, num_outputs - 1)
        row_of_lane += lane // OUTPUTS * num_outputs
        lane_ptr = weight_ptr + row_of_lane.to(tl.int64) * num_inputs
        prefetch(lane_ptr, tl.where(lane < 2 * OUTPUTS, AHEAD, 0))
    wait_for_inputs(PDL)
    token = tl.arange(0, BLOCK_T)
    rows_ptr, token_mask = x_ptr + token[:, None] * num_inputs, (token < num_tokens)[:, None]
    gate = tl.zeros((BLOCK_T, OUTPUTS), tl.float32)
    up = tl.zeros((BLOCK_T, OUTPUTS), tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)[None, :]
        x = _load_tokens(rows_ptr, inputs, token_mask, num_inputs, EVEN)
        gate = _dot(x, _load(gate_ptr[:, None], inputs, num_inputs, EVEN), gate, WIDE)
        up = _dot(x, _load(up_ptr[:, None], inputs, num_inputs, EVEN), up, WIDE)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + row).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + num_outputs + row).to(tl.float32)[None, :]
    out = gate / (1.0 + tl.exp(-gate)) * up
    place = token[:, None].to(tl.int64) * num_outputs + output[None, :]
    stored = token_mask & (output < num_outputs)[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=stored)


def launch_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tiling: GemmTiling
) -> None:
    """out = silu(gate) * up of x @ weight.T + bias, all contiguous

    x: [tokens, inputs], weight: [2n, inputs], gates first, out: [tokens, n]
    """
    (num_tokens, num_inputs), num_outputs = x.shape, weight.shape[0] // 2
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape[1] == num_inputs
    assert out.is_contiguous() and out.shape == (num_tokens, num_outputs)
    assert tiling.dot and tiling.ways == 1 and not tiling.tokens, tiling
    outputs, options = tiling.rows // 2, overlapping(x)
    ahead = tiling.num_stages * tiling.block_k * weight.dtype.itemsize
    row_bytes = num_inputs * weight.dtype.itemsize
    if not options["PDL"] or row_bytes % 16 != 0 or weight.data_ptr() % 16 != 0:
        ahead = 0
    kernel = _gated_kernel[(triton.cdiv(num_outputs, outputs),)](
        x, weight, bias, out, num_tokens, num_outputs, num_inputs,
        EVEN=num_inputs % tiling.block_k == 0, BLOCK_T=tiling.block_t(num_tokens),
        OUTPUTS=outputs, BLOCK_K=tiling.block_k, AHEAD=min(ahead, row_bytes),
        LANES=max(tiling.rows, 32 * tiling.num_warps),
        # Triton's interpreter cannot multiply in bfloat16.
        WIDE=INTERPRETED and x.dtype == torch.bfloat16,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **options,
    )  # fmt: skip
    divide_memory(kernel, SHARED_FIRST)
