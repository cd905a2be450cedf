"""RMSNorm, alone and with the residual add, and the gated activation."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.library import register

MAX_WARPS = 16


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    stream_ptr,
    size,
    x_stride,
    out_stride,
    eps,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. With ADDS the sum goes to `stream`, rounded as it is stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0)
    wide = x.to(tl.float32)
    if ADDS:
        residual = tl.load(residual_ptr + row * size + column, mask=live, other=0.0)
        total = (wide + residual.to(tl.float32)).to(x.dtype)
        tl.store(stream_ptr + row * size + column, total, mask=live)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, wide * scale * weight, mask=live)


@register("rms_norm_(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()")
def rms_norm_(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x and out: [..., n], each with rows at one distance from each other"""
    rows = x.flatten(0, -2) if x.dim() > 2 else x.view(-1, x.shape[-1])
    size = rows.shape[1]
    out_stride = out.stride(-2) if out.dim() > 1 else size
    _rms_norm_kernel[(rows.shape[0],)](
        rows, rows, weight, out, out, size, rows.stride(0), out_stride, eps,
        ADDS=False, BLOCK=triton.next_power_of_2(size), num_warps=_num_warps(size),
    )  # fmt: skip


@register(
    "add_rms_norm_(Tensor x, Tensor residual, Tensor weight, float eps, Tensor(a!) out, "
    "Tensor(b!) stream) -> ()"
)
def add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, stream: Tensor
) -> None:
    """x, residual, out, stream: [tokens, n], contiguous"""
    size = x.shape[-1]
    _rms_norm_kernel[(x.numel() // size,)](
        x, residual, weight, out, stream, size, size, size, eps,
        ADDS=True, BLOCK=triton.next_power_of_2(size), num_warps=_num_warps(size),
    )  # fmt: skip


def _num_warps(size: int) -> int:
    return min(MAX_WARPS, max(1, triton.next_power_of_2(size) // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm_(x, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, stream = torch.empty_like(x), torch.empty_like(residual)
    add_rms_norm_(x, residual, weight, eps, out, stream)
    return out, stream


def join_norms(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    width = sum(part.shape[1] for part in parts)
    out = torch.empty(parts[0].shape[0], width, dtype=parts[0].dtype, device=parts[0].device)
    start = 0
    for part, weight in zip(parts, weights, strict=True):
        rms_norm_(part, weight, eps, out[:, start : start + part.shape[1]])
        start += part.shape[1]
    return out


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    gate = tl.load(x_ptr + row * 2 * size + column, mask=live, other=0.0)
    up = tl.load(x_ptr + row * 2 * size + size + column, mask=live, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded between the two steps, as the reference is.
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, silu * up.to(tl.float32), mask=live)


@register("silu_and_mul_(Tensor gate_up, Tensor(a!) out) -> ()")
def silu_and_mul_(gate_up: Tensor, out: Tensor) -> None:
    """gate_up: [tokens, 2n], out: [tokens, n], contiguous"""
    tokens, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul_kernel[(tokens, triton.cdiv(size, block))](
        gate_up, out, size, BLOCK=block, num_warps=4
    )


def silu_and_mul(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    silu_and_mul_(gate_up, out)
    return out
