"""Soft cross-entropy in chunks, so that the logits of a pass are never in memory as a whole.

The gradient of a cross-entropy follows directly from its logits. The forward pass computes it, so
that the logits are not computed twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stoop.ops.dense import dense
from stoop.ops.linear import logits_of

CHUNK_VALUES = 2**26  # logits at a time


def soft_cross_entropy(
    states: Tensor, matrix: Tensor, labels: Tensor, index: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of -sum(p log q), and the head's argmax, [rows] int64.

    states: [rows, hidden_size]; matrix: [drafts, hidden_size]; labels: [labels, drafts], p of each
    label; index: [rows] int64, the label of each row; weights: [rows]
    """
    grads = torch.is_grad_enabled()
    loss, best = _SoftCrossEntropy.apply(states, matrix, labels, index, weights, grads)
    return loss, best


class _SoftCrossEntropy(torch.autograd.Function):
    """The loss, with gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        matrix: Tensor,
        labels: Tensor,
        index: Tensor,
        weights: Tensor,
        grads: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = labels.dtype
        best = torch.empty_like(index)
        dstates, dmatrix = torch.empty_like(states), torch.zeros_like(matrix, dtype=wide)
        loss = torch.zeros((), dtype=wide, device=states.device)
        size = max(1, CHUNK_VALUES // matrix.shape[0])
        for start in range(0, len(states), size):
            rows = slice(start, start + size)
            logits = logits_of(states[rows], dense(matrix))
            best[rows] = logits.argmax(-1)
            p, weight = labels[index[rows]], weights[rows, None]
            lse = logits.logsumexp(-1, keepdim=True)
            loss += (weight * (lse - (p * logits).sum(-1, keepdim=True))).sum()
            if grads:
                dlogits = logits.sub_(lse).exp_().sub_(p).mul_(weight).to(states.dtype)
                dstates[rows] = dlogits @ matrix
                dmatrix += dlogits.t() @ states[rows]
        ctx.save_for_backward(dstates, dmatrix.to(matrix.dtype))
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dstates, dmatrix = ctx.saved_tensors
        return (
            grad.to(dstates.dtype) * dstates,
            grad.to(dmatrix.dtype) * dmatrix,
            None,
            None,
            None,
            None,
        )
