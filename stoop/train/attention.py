"""Stateful layers over packs, without a cache.

The target uses causal attention within each document, and so does the head in its first pass. In
later passes each anchor continues its own chain of drafts, and attends to what a draft decode step
would: the keys of true features up to the anchor, and the keys of the chain's own drafts. On a GPU,
FlashAttention computes the first part, and the few keys of the chain are merged into its result.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from stoop.attention.base import AttentionShape
from stoop.config.errors import ConfigError
from stoop.core.state import RecurrentState
from stoop.layers.attention import Attention
from stoop.layers.stateful import StatefulLayer
from stoop.ops.recurrent import RecurrentRows
from stoop.train.packing import Layout


class PackedContext:
    """The forward context of the target: each document by itself; nothing is kept."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def run(self, layer: StatefulLayer, *inputs: Any) -> Tensor:
        state = layer.state
        if isinstance(state, RecurrentState):
            return layer.core(self._states(state), self._rows, *inputs)
        layer = _attention(layer)
        return attend(self.layout, layer.shape, *layer.rotated(*inputs))

    def _states(self, state: RecurrentState) -> dict[str, Tensor]:
        """Empty states of one layer, a slot for each document and the sink."""
        num_rows, device = len(self.layout.lengths) + 1, self.layout.starts.device
        return {
            name: torch.zeros(
                num_rows, *spec.shape, dtype=getattr(torch, spec.dtype), device=device
            )
            for name, spec in state.slot_tensors(query_len=1).items()
        }

    @functools.cached_property
    def _rows(self) -> RecurrentRows:
        """Documents as the rows of a step, each a prompt without context."""
        starts = self.layout.starts
        lengths = starts[1:] - starts[:-1]
        slots = torch.arange(lengths.shape[0], device=starts.device)
        pending = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=starts.device)
        return RecurrentRows(
            query_start_loc=starts,
            context_lens=torch.zeros_like(lengths),
            seq_lens=lengths,
            slots=slots,
            pending=pending,
            short=self.layout.longest == 1,
        )


class UnrolledContext:
    """The forward context of a head's passes, which keeps the keys and values of all passes."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.kept: dict[Attention, list[Tensor]] = {}  # by layer: k, v of each pass in turn

    def run(self, layer: StatefulLayer, *inputs: Any) -> Tensor:
        layer = _attention(layer)
        assert layer.shape.window is None, "a window moves with the drafts, which is not done here"
        q, k, v = layer.rotated(*inputs)
        kept = self.kept.setdefault(layer, [])
        kept += (k, v)
        return attend(self.layout, layer.shape, q, *kept)


def _attention(layer: StatefulLayer) -> Attention:
    if not isinstance(layer, Attention):
        raise ConfigError(
            f"train-draft cannot run a model with {type(layer).__name__} layers: use one that has "
            "attention and recurrent layers only"
        )
    return layer


def attend(layout: Layout, shape: AttentionShape, q: Tensor, *kv: Tensor) -> Tensor:
    """Attend to pass 0's keys of the document up to each anchor, and to later passes' own keys.

    q: [tokens, heads, head_dim]; kv: k, v of each pass, [tokens, kv_heads, head_dim]
    """
    out: Tensor = _ChainAttention.apply(layout, shape, q, *kv)
    return out


class _ChainAttention(torch.autograd.Function):
    """Attention with one softmax over the document's keys and the chain's own keys.

    The backward pass computes each part's gradient from the joint output and the joint logsumexp,
    as if the part were the whole.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, layout: Layout, shape: AttentionShape, q: Tensor, *kv: Tensor
    ) -> Tensor:
        k, v, *chain = kv
        out, lse = _context(layout, shape, q, k, v)
        if chain:
            out, lse = _join(q, out, lse, chain, shape)
        ctx.save_for_backward(q, out, lse, *kv)
        ctx.layout, ctx.shape = layout, shape  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, k, v, *chain = ctx.saved_tensors
        scale = ctx.shape.scale
        dq, dk, dv = _context_grads(ctx.layout, ctx.shape, grad, q, k, v, out, lse)
        grads, dq = [dk, dv], dq.to(lse.dtype)
        gq, gg = _grouped(q, k), _grouped(grad, k)  # [tokens, kv_heads, group, head_dim]
        gdq = _grouped(dq, k)
        shift = (gg * _grouped(out, k)).sum(-1)
        for own_k, own_v in zip(chain[::2], chain[1::2], strict=True):
            weight = (_scores(gq, own_k, scale) - _grouped(lse[..., None], k)[..., 0]).exp()
            dscore = scale * weight * ((gg * own_v[:, :, None]).sum(-1) - shift)
            gdq = gdq + dscore[..., None] * own_k[:, :, None]
            grads.append((dscore[..., None] * gq).sum(2).to(own_k.dtype))
            grads.append((weight[..., None] * gg).sum(2).to(own_v.dtype))
        return None, None, gdq.view_as(q).to(q.dtype), *grads


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Group heads by their KV head: [tokens, heads, n] to [tokens, kv_heads, group, n]."""
    x = x if x.dtype == torch.float64 else x.float()
    return x.unflatten(1, (k.shape[1], -1))


def _scores(gq: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return each anchor's score of its own key: [tokens, kv_heads, group]."""
    return scale * (gq * k[:, :, None]).sum(-1)


def _join(
    q: Tensor, out: Tensor, lse: Tensor, chain: list[Tensor], shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """Merge the chain's own keys and values into the document's outputs and logsumexp."""
    keys, values = chain[::2], chain[1::2]
    gq = _grouped(q, keys[0])
    scores = [_scores(gq, k, shape.scale).flatten(1) for k in keys]  # [tokens, heads] each
    total = torch.stack((lse, *scores)).logsumexp(0)
    joined = _grouped((lse - total).exp()[..., None] * out, keys[0])
    for score, v in zip(scores, values, strict=True):
        joined = joined + _grouped((score - total).exp()[..., None], v) * v[:, :, None]
    return joined.flatten(1, 2).to(q.dtype), total


# ---- causal attention within documents ----


def _flash(q: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)


def _flash_window(shape: AttentionShape) -> dict[str, int]:
    return {
        "window_size_left": -1 if shape.window is None else shape.window - 1,
        "window_size_right": 0,
    }


def _context(
    layout: Layout, shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs in the shape of q, and the logsumexp of the scores, [tokens, heads]."""
    if _flash(q):
        starts, longest = layout.starts, layout.longest
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q.contiguous(), k.contiguous(), v.contiguous()),
            *(starts, starts, longest, longest, 0.0, shape.window is None, False),
            scale=shape.scale,
            **_flash_window(shape),
        )
        return out, lse.t()  # from [heads, tokens]
    outs, sums = [], []
    for part in layout.slices():
        scores = _masked_scores(shape, q[part], k[part])
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        outs.append(torch.einsum("hij,jhd->ihd", weights, _spread(v[part], q)))
        sums.append(lse.t())
    return torch.cat(outs).to(q.dtype), torch.cat(sums)


def _context_grads(
    layout: Layout,
    shape: AttentionShape,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. out, lse: those of the whole softmax"""
    if _flash(q):
        starts, longest = layout.starts, layout.longest
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), out),
            *(lse.t().contiguous(), starts, starts, longest, longest, 0.0, shape.window is None),
            *(random_state, torch.empty(0, device=q.device)),
            scale=shape.scale,
            **_flash_window(shape),
        )
        return dq, dk, dv
    parts = []
    for part in layout.slices():
        own_q, own_grad = (_wide(x[part]) for x in (q, grad))
        keys, values = (_spread(x[part], q) for x in (k, v))
        weights = (_masked_scores(shape, q[part], k[part]) - lse[part].t()[..., None]).exp()
        dweights = torch.einsum("ihd,jhd->hij", own_grad, values)
        shift = (own_grad * out[part]).sum(-1).t()
        dscores = shape.scale * weights * (dweights - shift[..., None])
        dq = torch.einsum("hij,jhd->ihd", dscores, keys)
        dk = torch.einsum("hij,ihd->jhd", dscores, own_q)
        dv = torch.einsum("hij,ihd->jhd", weights, own_grad)
        group = (k.shape[1], -1)
        parts.append((dq, dk.unflatten(1, group).sum(2), dv.unflatten(1, group).sum(2)))
    dq, dk, dv = (torch.cat(each).to(q.dtype) for each in zip(*parts, strict=True))
    return dq, dk, dv


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for every query head: [tokens, heads, head_dim]."""
    return _wide(x).repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _masked_scores(shape: AttentionShape, q: Tensor, k: Tensor) -> Tensor:
    """Return the masked attention scores of one document: [heads, tokens, tokens]."""
    scores = shape.scale * torch.einsum("ihd,jhd->hij", _wide(q), _spread(k, q))
    place = torch.arange(q.shape[0], device=q.device)
    distance = place[:, None] - place
    seen = distance >= 0
    if shape.window is not None:
        seen &= distance < shape.window
    return scores.masked_fill(~seen, -torch.inf)
