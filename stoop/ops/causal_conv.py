"""Depthwise causal convolution over a request's text, with the last inputs kept by slot."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.ops.dispatch import op
from stoop.ops.library import register
from stoop.ops.recurrent import LiveRow, RecurrentRows, live_rows, silu


@dataclass(frozen=True)
class ConvState:
    """The last inputs of every slot, w - 1 before the log. Rows may lie far apart."""

    window: Tensor  # [slots + 1, w - 1, channels], oldest first
    log: Tensor  # [slots + 1, log_len, channels]


@op("x")
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: RecurrentRows, state: ConvState
) -> Tensor:
    """silu of the convolution, as Mamba-2 and delta nets use it.

    x: [tokens, channels], rows may lie apart; weight: [channels, 1, w]; returns [tokens, channels]
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _causal_conv(x, weight, bias, *rows.tensors, state.window, state.log, out)
    return out


@op("bcx")
def gated_conv(
    bcx: Tensor, weight: Tensor, bias: Tensor | None, rows: RecurrentRows, state: ConvState
) -> Tensor:
    """C * conv(B * x), the short convolution of LFM2. What is kept are the products B * x.

    bcx: [tokens, 3 * channels]: B, C and x side by side; returns [tokens, channels]
    """
    out = bcx.new_empty(bcx.shape[0], bcx.shape[1] // 3)
    _gated_conv(bcx, weight, bias, *rows.tensors, state.window, state.log, out)
    return out


_ROWS = "Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, Tensor slots, Tensor pending"
_STATE = "Tensor(a!) window, Tensor(b!) log, Tensor(c!) out"


@register(f"causal_conv(Tensor x, Tensor weight, Tensor? bias, {_ROWS}, {_STATE}) -> ()")
def _causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Tensor) -> None:
    *rows, window, log, out = rest
    out.zero_()
    for row in live_rows(rows, log_len=log.shape[1]):
        out[row.tokens] = silu(_convolve(x[row.tokens], weight, bias, row, window, log))


@register(f"gated_conv(Tensor bcx, Tensor weight, Tensor? bias, {_ROWS}, {_STATE}) -> ()")
def _gated_conv(bcx: Tensor, weight: Tensor, bias: Tensor | None, *rest: Tensor) -> None:
    *rows, window, log, out = rest
    out.zero_()
    for row in live_rows(rows, log_len=log.shape[1]):
        before, after, x = bcx[row.tokens].chunk(3, dim=1)
        out[row.tokens] = after * _convolve(before * x, weight, bias, row, window, log)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, row: LiveRow, window: Tensor, log: Tensor
) -> Tensor:
    """One row's outputs, in float32 or better; moves its window and log."""
    width = weight.shape[2]
    kept = torch.zeros_like(window[row.slot])
    if not row.fresh:
        seen = torch.cat((window[row.slot], log[row.slot, : row.pending]))
        kept = seen[seen.shape[0] - (width - 1) :]
    inputs = torch.cat((kept, x))
    if row.logs:
        window[row.slot] = kept
        log[row.slot, : row.count] = x
    else:
        window[row.slot] = inputs[inputs.shape[0] - (width - 1) :]
    wide = inputs if inputs.dtype == torch.float64 else inputs.float()
    taps = weight[:, 0].to(wide.dtype)  # [channels, w]
    y = wide[: row.count] * taps[:, 0]
    for tap in range(1, width):
        y = y + wide[tap : tap + row.count] * taps[:, tap]
    return y if bias is None else y + bias.to(y.dtype)
