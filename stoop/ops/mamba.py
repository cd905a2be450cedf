"""The state-space layer of Mamba-2, and norms that gate.

For a head with state S [head_dim, state_size] and a token with input x, time step dt and the
group's B and C:

    S = decay * S + (dt * x) B^T;  y = S C + D * x

The log has (decay, dt * x, B). Many heads read the B of a group, and kernels do not order their
programs, so nothing may be overwritten that the same step reads. B and decays lie in a ring of two
steps' places, by the position of their token in its request.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.ops.dispatch import op
from stoop.ops.library import register
from stoop.ops.native.recurrent import fits, run_tokens
from stoop.ops.recurrent import LiveRow, RecurrentRows, live_rows, silu, softplus


@dataclass(frozen=True)
class MambaState:
    """By slot, in float32 or better. Rows may lie far apart."""

    matrix: Tensor  # [slots + 1, heads, head_dim, state_size]
    input_log: Tensor  # [slots + 1, log_len, heads, head_dim]: dt * x
    b_log: Tensor  # [slots + 1, log_len, 2, groups, state_size], a ring of 2 * log_len places
    decay_log: Tensor  # [slots + 1, log_len, 2, heads], too


@dataclass(frozen=True)
class MambaWeights:
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    d: Tensor  # [heads]
    dt_min: float = 0.0  # limits of the time step
    dt_max: float = float("inf")
    native: bool = False  # on a CPU, C++ runs the token loop


@op("xbc")
def mamba(
    xbc: Tensor, dt: Tensor, weights: MambaWeights, rows: RecurrentRows, state: MambaState
) -> Tensor:
    """Run the recurrence over a step's tokens.

    xbc: [tokens, heads * head_dim + 2 * groups * state_size], contiguous, after convolution
    dt: [tokens, heads], rows may lie apart; returns [tokens, heads * head_dim]
    """
    _, heads, head_dim, _ = state.matrix.shape
    out = xbc.new_empty(xbc.shape[0], heads * head_dim)
    limits = (weights.dt_min, weights.dt_max)
    _mamba(
        *(xbc, dt, weights.a_log, weights.dt_bias, weights.d, *limits, weights.native),
        *rows.tensors,
        *(state.matrix, state.input_log, state.b_log, state.decay_log, out),
    )
    return out


@register(
    "mamba(Tensor xbc, Tensor dt, Tensor a_log, Tensor dt_bias, Tensor d, float dt_min, "
    "float dt_max, bool native, Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, "
    "Tensor slots, Tensor pending, Tensor(a!) matrix, Tensor(b!) input_log, Tensor(c!) b_log, "
    "Tensor(d!) decay_log, Tensor(e!) out) -> ()"
)
def _mamba(
    xbc: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    dt_min: float,
    dt_max: float,
    native: bool,
    *rest: Tensor,
) -> None:
    *rows, matrix, input_log, b_log, decay_log, out = rest
    state = MambaState(matrix, input_log, b_log, decay_log)
    _, heads, head_dim, size = matrix.shape
    groups, dtype = b_log.shape[3], matrix.dtype
    out.zero_()
    run = _run_natively if native and fits(matrix, size, head_dim) else _run
    for row in live_rows(rows, log_len=b_log.shape[1]):
        sizes = (heads * head_dim, groups * size, groups * size)
        x, b, c = (part.to(dtype) for part in xbc[row.tokens].split(sizes, dim=1))
        x, b, c = x.unflatten(1, (heads, -1)), *(p.unflatten(1, (groups, -1)) for p in (b, c))
        step = softplus(dt[row.tokens].to(dtype) + dt_bias.to(dtype)).clamp(dt_min, dt_max)
        decay = torch.exp(-torch.exp(a_log.to(dtype)) * step)  # [tokens, heads]
        y = run(row, x * step[..., None], b, c, decay, state)
        y = y + d.to(dtype)[:, None] * x
        out[row.tokens] = y.flatten(1).to(out.dtype)


def _run(
    row: LiveRow, inputs: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: MambaState
) -> Tensor:
    """The recurrence of one row, token by token; returns [tokens, heads, head_dim]."""
    slot, repeat = row.slot, inputs.shape[1] // b.shape[1]
    b_log, decay_log = state.b_log[slot].flatten(0, 1), state.decay_log[slot].flatten(0, 1)
    old, new = _places(row, state)
    wide_b, wide_c = (each.repeat_interleave(repeat, dim=1) for each in (b, c))
    s = torch.zeros_like(state.matrix[slot])
    if not row.fresh:
        s = state.matrix[slot].clone()
        logged = b_log[old].repeat_interleave(repeat, dim=1)
        for place, faded in enumerate(decay_log[old]):
            s = s * faded[:, None, None]
            s = s + state.input_log[slot, place][:, :, None] * logged[place][:, None]
    if row.logs:
        state.matrix[slot] = s
        state.input_log[slot, : row.count] = inputs
        b_log[new] = b
        decay_log[new] = decay
    out = torch.empty_like(inputs)
    for place in range(row.count):
        s = s * decay[place][:, None, None]
        s = s + inputs[place][:, :, None] * wide_b[place][:, None]
        out[place] = (s * wide_c[place][:, None]).sum(-1)
    if not row.logs:
        state.matrix[slot] = s
    return out


def _run_natively(
    row: LiveRow, inputs: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: MambaState
) -> Tensor:
    """The same in C++."""
    slot, (old, new) = row.slot, _places(row, state)
    b_log, decay_log = state.b_log[slot].flatten(0, 1), state.decay_log[slot].flatten(0, 1)
    logged = (b_log[old], state.input_log[slot, : row.pending], decay_log[old])
    matrix, tokens = state.matrix[slot], (b, c, inputs, decay)
    out, _ = run_tokens(matrix, logged, tokens, fresh=row.fresh, logs=row.logs)
    if row.logs:
        state.input_log[slot, : row.count] = inputs
        b_log[new], decay_log[new] = b, decay
    return out


def _places(row: LiveRow, state: MambaState) -> tuple[Tensor, ...]:
    """In the ring of B and decays: those of the pending tokens, and of the new ones."""
    positions = torch.arange(row.context - row.pending, row.context + row.count)
    return (positions % (2 * state.b_log.shape[1])).split((row.pending, row.count))


@op("x")
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """RMSNorm of x * silu(gate), in groups of equal size, as Mamba-2 has it: the gate comes first.

    x: [tokens, n], contiguous; gate: [tokens, n], rows may lie apart; weight: [n]
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    gated = (x.to(wide) * silu(gate.to(wide))).unflatten(1, (groups, -1))
    normed = F.rms_norm(gated, (gated.shape[-1],), None, eps).flatten(1)
    return (normed * weight.to(wide)).to(x.dtype)
