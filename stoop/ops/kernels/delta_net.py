"""The gated delta rule: short rows step by step, longer ones by chunks (`delta_chunk.py`)."""

from typing import Any

import torch
import triton
from torch import Tensor

from stoop.ops.delta_net import DeltaGates, DeltaState, DeltaWeights
from stoop.ops.kernels.choice import serves_delta_dim
from stoop.ops.kernels.delta_chunk import CHUNK, prepare_kernel, scan_kernel
from stoop.ops.kernels.delta_step import finish_kernel, step_kernel
from stoop.ops.kernels.launch import INTERPRETED, overlapping
from stoop.ops.kernels.recurrent import count_tiles
from stoop.ops.library import register
from stoop.ops.recurrent import RecurrentRows

# Columns of a state and warps of a program of `step_kernel`. They decide in what order sums over
# key_dim are taken, so they must not depend on the batch.
STEP_COLUMNS = 32
STEP_WARPS = 1
FINISH_HEADS = 4
FINISH_WARPS = 4
SCAN_COLUMNS = 32
SCAN_COLUMNS_WIDE = 16  # of float32 models, whose products take more registers
SCAN_WARPS = 4
SCAN_STAGES = 2
SCAN_PROGRAMS = 256  # at least, if there are enough rows
PREPARE_WARPS = 4
CHUNK_TOKENS = 8  # of a tile of `finish_kernel`, if some row may be a chunk

_ROWS = "Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, Tensor slots"


def _sizes(matrix: Tensor, key_log: Tensor) -> dict[str, int]:
    """What kernels know of a model."""
    _, value_heads, key_dim, value_dim = matrix.shape
    for name, size in (("key_dim", key_dim), ("value_dim", value_dim)):
        assert serves_delta_dim(size), f"{name} {size} is no power of two from 16 on"
    assert value_heads % key_log.shape[2] == 0, (value_heads, key_log.shape[2])
    assert key_log.shape[3] == key_dim, (key_log.shape, matrix.shape)
    return {"HV": value_heads, "HK": key_log.shape[2], "DK": key_dim, "DV": value_dim}


def _check_state(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.float32 and tensor[0].is_contiguous(), tensor.dtype


@register(
    "delta_step_(Tensor qkv, Tensor b, Tensor a, Tensor a_log, Tensor dt_bias, "
    f"{_ROWS}, Tensor pending, Tensor(a!) matrix, Tensor key_log, Tensor(b!) update_log, "
    "Tensor decay_log, Tensor(c!) raw, Tensor(d!) keys, Tensor(e!) decays) -> ()"
)
def delta_step_(qkv: Tensor, b: Tensor, a: Tensor, *rest: Tensor) -> None:
    *_, slots, _, matrix, key_log, update_log, decay_log, _, _, _ = rest
    _check_state(matrix, key_log, update_log, decay_log)
    sizes = _sizes(matrix, key_log)
    columns = min(STEP_COLUMNS, sizes["DV"])
    programs = slots.shape[0] * sizes["HV"] * (sizes["DV"] // columns)
    step_kernel[(programs,)](
        qkv, b, a, *rest, key_log.shape[1], qkv.stride(0), b.stride(0), a.stride(0),
        matrix.stride(0), key_log.stride(0), update_log.stride(0), decay_log.stride(0),
        **sizes, BV=columns, num_warps=STEP_WARPS, **overlapping(qkv),
    )  # fmt: skip


@register(
    "delta_prepare_(Tensor qkv, Tensor b, Tensor a, Tensor a_log, Tensor dt_bias, "
    f"{_ROWS}, int log_len, Tensor(a!) w, Tensor(b!) u, Tensor(c!) p, Tensor(d!) scales) -> ()"
)
def delta_prepare_(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, starts: Tensor,
    contexts: Tensor, seq_lens: Tensor, slots: Tensor, log_len: int, w: Tensor, u: Tensor,
    p: Tensor, scales: Tensor,
) -> None:  # fmt: skip
    (tokens, value_heads, key_dim), value_dim = w.shape, u.shape[2]
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    num_reqs = slots.shape[0]
    prepare_kernel[(count_tiles(tokens, num_reqs, CHUNK.value, short=False), value_heads)](
        qkv, b, a, a_log, dt_bias, starts, contexts, seq_lens, slots, w, u, p, scales, num_reqs,
        log_len, b.stride(0), a.stride(0), scales.stride(0),
        HV=value_heads, HK=key_heads, DK=key_dim, DV=value_dim, PRECISION=_precision(qkv),
        WIDE=INTERPRETED, num_warps=PREPARE_WARPS, **overlapping(qkv),
    )  # fmt: skip


@register(
    f"delta_scan_(Tensor qkv, {_ROWS}, Tensor pending, Tensor(a!) matrix, Tensor key_log, "
    "Tensor update_log, Tensor decay_log, Tensor w, Tensor(b!) raw, Tensor p, Tensor scales) -> ()"
)
def delta_scan_(qkv: Tensor, *rest: Tensor) -> None:
    *_, slots, _, matrix, key_log, update_log, decay_log, _, _, _, scales = rest
    _check_state(matrix, key_log, update_log, decay_log)
    sizes, log_len, num_reqs = _sizes(matrix, key_log), key_log.shape[1], slots.shape[0]
    wide = qkv.dtype == torch.float32
    columns = min(SCAN_COLUMNS_WIDE if wide else SCAN_COLUMNS, sizes["DV"])
    programs = sizes["HV"] * (sizes["DV"] // columns)
    longest = max(1, min(num_reqs, qkv.shape[0] // (log_len + 1)))  # long rows there may be
    together = min(longest, triton.cdiv(SCAN_PROGRAMS, programs))
    scan_kernel[(programs, together)](
        qkv, *rest, num_reqs, log_len, scales.stride(0), matrix.stride(0), key_log.stride(0),
        update_log.stride(0), decay_log.stride(0),
        **sizes, BV=columns, STAGES=SCAN_STAGES, PRECISION=_precision(qkv), WIDE=INTERPRETED,
        num_warps=SCAN_WARPS, **overlapping(qkv),
    )  # fmt: skip


def _precision(qkv: Tensor) -> str:
    return "tf32x3" if qkv.dtype == torch.float32 else "tf32"


@register(
    "delta_finish_(Tensor raw, Tensor keys, Tensor decays, Tensor z, Tensor norm, float eps, "
    f"{_ROWS}, bool short, Tensor(a!) key_log, Tensor(b!) decay_log, "
    "Tensor(c!) out) -> ()"
)
def delta_finish_(
    raw: Tensor, keys: Tensor, decays: Tensor, z: Tensor, norm: Tensor, eps: float,
    starts: Tensor, contexts: Tensor, seq_lens: Tensor, slots: Tensor, short: bool,
    key_log: Tensor, decay_log: Tensor, out: Tensor,
) -> None:  # fmt: skip
    num_tokens, value_heads, value_dim = raw.shape
    _, log_len, key_heads, key_dim = key_log.shape
    num_reqs = slots.shape[0]
    tile = triton.next_power_of_2(max(log_len, 1 if short else CHUNK_TOKENS))
    heads = min(FINISH_HEADS, triton.next_power_of_2(value_heads))
    groups = triton.cdiv(value_heads, heads)
    assert out.is_contiguous() and z.stride(1) == 1
    finish_kernel[(count_tiles(num_tokens, num_reqs, tile, short=short), groups)](
        raw, keys, decays, z, norm, starts, contexts, seq_lens, slots, key_log, decay_log, out,
        eps, num_tokens, num_reqs, log_len, z.stride(0), key_log.stride(0), decay_log.stride(0),
        HV=value_heads, HK=key_heads, DK=key_dim, DV=value_dim, HEADS=heads,
        KEYS=triton.next_power_of_2(triton.cdiv(key_heads * key_dim, groups)),
        SHORT=short, TILE=tile, num_warps=FINISH_WARPS, **overlapping(out),
    )  # fmt: skip


def delta_net(
    qkv: Tensor, gates: DeltaGates, weights: DeltaWeights, rows: RecurrentRows, state: DeltaState
) -> Tensor:
    """Run the recurrence over a step's tokens; each head's output is normalised, then gated.

    qkv: [tokens, 2 * key_heads * key_dim + value_heads * value_dim], contiguous, after convolution
    returns [tokens, value_heads * value_dim]
    """
    tokens, value_heads = gates.b.shape
    assert qkv.is_contiguous() and max(qkv.numel(), gates.z.numel()) < 2**31, qkv.shape
    *_, key_dim, value_dim = state.matrix.shape
    wide: dict[str, Any] = {"dtype": torch.float32, "device": qkv.device}
    raw = torch.empty(tokens, value_heads, value_dim, **wide)
    keys = torch.empty(tokens, state.key_log.shape[2], key_dim, **wide)
    decays = torch.empty(tokens, value_heads, **wide)
    out = torch.empty_like(gates.z, memory_format=torch.contiguous_format)
    logs = (state.key_log, state.update_log, state.decay_log)
    heads = (weights.a_log, weights.dt_bias)
    if not rows.short:
        w = torch.empty(tokens, value_heads, key_dim, **wide)
        p = torch.empty(tokens, value_heads, CHUNK.value, **wide)
        scales = torch.empty(3, tokens, value_heads, **wide)
        delta_prepare_(
            qkv, gates.b, gates.a, *heads, *rows.tensors[:4], state.key_log.shape[1], w, raw, p,
            scales,
        )  # fmt: skip
        delta_scan_(qkv, *rows.tensors, state.matrix, *logs, w, raw, p, scales)
    # The steps come last: `finish_kernel` relies on when they signal.
    delta_step_(
        qkv, gates.b, gates.a, *heads, *rows.tensors, state.matrix, *logs, raw, keys, decays
    )
    delta_finish_(
        raw, keys, decays, gates.z, weights.norm, weights.eps, *rows.tensors[:4], rows.short,
        state.key_log, state.decay_log, out,
    )  # fmt: skip
    return out
