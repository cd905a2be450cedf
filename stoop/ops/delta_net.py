"""The gated delta rule: a matrix for each head that forgets, corrects itself and is read.

For a head with state S [key_dim, value_dim] and a token with key k, value v and query q:

    S = decay * S;  u = beta * (v - S^T k);  S = S + k u^T;  o = S^T q

The log has what moves the state, (decay, k, u), so folding a token is S = decay * S + k u^T.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.ops.dispatch import op
from stoop.ops.library import register
from stoop.ops.native.recurrent import fits, run_tokens
from stoop.ops.recurrent import LiveRow, RecurrentRows, live_rows, sigmoid, silu, softplus

L2_EPS = 1e-6  # of the norms of q and k, inside the root


@dataclass(frozen=True)
class DeltaState:
    """By slot, in float32 or better. Rows may lie far apart."""

    matrix: Tensor  # [slots + 1, value_heads, key_dim, value_dim]
    key_log: Tensor  # [slots + 1, log_len, key_heads, key_dim], normalised
    update_log: Tensor  # [slots + 1, log_len, value_heads, value_dim]: u
    decay_log: Tensor  # [slots + 1, log_len, value_heads]


@dataclass(frozen=True)
class DeltaGates:
    """Projections of the same tokens; rows may lie apart."""

    z: Tensor  # [tokens, value_heads * value_dim]: gates the output
    b: Tensor  # [tokens, value_heads]: sigmoid(b) is beta
    a: Tensor  # [tokens, value_heads]: decides the decay


@dataclass(frozen=True)
class DeltaWeights:
    a_log: Tensor  # [value_heads]
    dt_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim], of each head's output
    eps: float
    native: bool = False  # on a CPU, C++ runs the token loop


@op("qkv")
def delta_net(
    qkv: Tensor, gates: DeltaGates, weights: DeltaWeights, rows: RecurrentRows, state: DeltaState
) -> Tensor:
    """Run the recurrence over a step's tokens; each head's output is normalised, then gated.

    qkv: [tokens, 2 * key_heads * key_dim + value_heads * value_dim], contiguous, after convolution
    returns [tokens, value_heads * value_dim]
    """
    out = torch.empty_like(gates.z, memory_format=torch.contiguous_format)
    _delta_net(
        *(qkv, gates.z, gates.b, gates.a),
        *(weights.a_log, weights.dt_bias, weights.norm, weights.eps, weights.native),
        *rows.tensors,
        *(state.matrix, state.key_log, state.update_log, state.decay_log, out),
    )
    return out


@register(
    "delta_net(Tensor qkv, Tensor z, Tensor b, Tensor a, Tensor a_log, Tensor dt_bias, "
    "Tensor norm, float eps, bool native, Tensor query_start_loc, Tensor context_lens, "
    "Tensor seq_lens, Tensor slots, Tensor pending, Tensor(a!) matrix, Tensor(b!) key_log, "
    "Tensor(c!) update_log, Tensor(d!) decay_log, Tensor(e!) out) -> ()"
)
def _delta_net(  # noqa: PLR0913
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    native: bool,
    *rest: Tensor,
) -> None:
    *rows, matrix, key_log, update_log, decay_log, out = rest
    state = DeltaState(matrix, key_log, update_log, decay_log)
    _, value_heads, _, value_dim = matrix.shape
    dtype = matrix.dtype
    key_heads, key_dim = key_log.shape[2:]
    sizes = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
    out.zero_()
    run = _run_natively if native and fits(matrix, key_dim, value_dim) else _run
    for row in live_rows(rows, log_len=key_log.shape[1]):
        q, k, v = (part.to(dtype) for part in qkv[row.tokens].split(sizes, dim=1))
        q, k = (l2_norm(part.unflatten(1, (key_heads, key_dim))) for part in (q, k))
        q, v = q * key_dim**-0.5, v.unflatten(1, (value_heads, value_dim))
        beta = sigmoid(b[row.tokens].to(dtype))
        decay = decay_of(a[row.tokens], a_log, dt_bias, dtype)
        o = run(row, q, k, v, beta, decay, state)
        normed = F.rms_norm(o, (value_dim,), norm.to(dtype), eps)
        gate = silu(z[row.tokens].to(dtype)).view_as(normed)
        out[row.tokens] = (normed * gate).flatten(1).to(out.dtype)


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def decay_of(a: Tensor, a_log: Tensor, dt_bias: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(-exp(a_log) * softplus(a + dt_bias)): at most 1"""
    rate = softplus(a.to(dtype) + dt_bias.to(dtype))
    return torch.exp(-torch.exp(a_log.to(dtype)) * rate)


def _run(
    row: LiveRow,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    state: DeltaState,
) -> Tensor:
    """The recurrence of one row, token by token; returns [tokens, value_heads, value_dim]."""
    slot, repeat = row.slot, v.shape[1] // k.shape[1]
    spread = [each.repeat_interleave(repeat, dim=1) for each in (q, k)]
    s = torch.zeros_like(state.matrix[slot])
    if not row.fresh:
        s = state.matrix[slot].clone()
        logged = state.key_log[slot, : row.pending].repeat_interleave(repeat, dim=1)
        for place in range(row.pending):
            s = s * state.decay_log[slot, place, :, None, None]
            s = s + logged[place][:, :, None] * state.update_log[slot, place][:, None]
    if row.logs:
        state.matrix[slot] = s
        state.key_log[slot, : row.count] = k
        state.decay_log[slot, : row.count] = decay
    out = torch.empty_like(v)
    for place in range(row.count):
        query, key = (each[place][:, :, None] for each in spread)
        s = s * decay[place][:, None, None]
        update = beta[place][:, None] * (v[place] - (s * key).sum(1))
        s = s + key * update[:, None]
        out[place] = (s * query).sum(1)
        if row.logs:
            state.update_log[slot, place] = update
    if not row.logs:
        state.matrix[slot] = s
    return out


def _run_natively(
    row: LiveRow,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    state: DeltaState,
) -> Tensor:
    """The same in C++."""
    logs = (state.key_log, state.update_log, state.decay_log)
    keys, updates, decays = (log[row.slot] for log in logs)
    old = (keys[: row.pending], updates[: row.pending], decays[: row.pending])
    matrix, new = state.matrix[row.slot], (k, q, v, decay)
    out, update = run_tokens(matrix, old, new, beta, fresh=row.fresh, logs=row.logs)
    if row.logs:
        assert update is not None
        keys[: row.count], updates[: row.count], decays[: row.count] = k, update, decay
    return out
