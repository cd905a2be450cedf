"""Which drafts stand, and what follows them. All rows have K drafts and K + 1 positions.

Position j of a row stands behind its known tokens and its first j drafts, and judges draft j.
Arguments: `drafts` [n, K] int64, `num_drafts` [n] int64.
"""

import torch
from torch import Tensor

from stoop.ops.random import Purpose, gumbel, uniform


def count_accepted(accepts: Tensor, num_drafts: Tensor) -> Tensor:
    """[n] int64: the length of the unbroken run of accepted drafts. accepts: [n, K] bool"""
    number = torch.arange(accepts.shape[1], device=accepts.device)
    stands = accepts & (number < num_drafts[:, None])
    return stands.long().cumprod(dim=1).sum(dim=1)


def join_tokens(drafts: Tensor, num_accepted: Tensor, chosen: Tensor) -> Tensor:
    """[n, K + 1] int64: accepted drafts, then the token chosen behind them; zeros follow.

    chosen: [n, K + 1] int64, the token for each position in case that it comes last
    """
    number = torch.arange(chosen.shape[1], device=chosen.device)
    padded = torch.nn.functional.pad(drafts, (0, 1))
    accepted = torch.where(number < num_accepted[:, None], padded, 0)
    return torch.where(number == num_accepted[:, None], chosen, accepted)


def accept_by_ratio(
    probs: Tensor, draft_probs: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """[n, K] bool: accept draft d with chance min(1, p(d) / q(d)).

    probs, draft_probs: [n, K, vocab_size]; seeds: [n]; positions: [n] of the first draft
    """
    p = probs.gather(2, drafts[:, :, None]).squeeze(2)
    q = draft_probs.gather(2, drafts[:, :, None]).squeeze(2)
    return _uniforms(seeds, positions, drafts.shape[1]).to(p.dtype) * q < p


def accept_at_rate(rates: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[n, K] bool: for benchmarks, by chance alone. rates: [K]"""
    return _uniforms(seeds, positions, rates.shape[0]) < rates


def draw_residual(probs: Tensor, draft_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[n, K] int64: a token from max(p - q, 0) at each draft, for the one that is refused.

    Noise is of its own stream: that which chose a refused draft is no longer noise.
    """
    n, count, vocab_size = probs.shape
    residual = (probs - draft_probs).clamp(min=0)
    # Where p equals q to the last bit nothing is refused but by rounding.
    empty = residual.sum(dim=2, keepdim=True) <= 0
    residual = torch.where(empty, probs, residual)
    place = (positions[:, None] + torch.arange(count, device=positions.device)).flatten()
    noise = gumbel(seeds.repeat_interleave(count), place, Purpose.RESAMPLE, vocab_size)
    return (residual.log() + noise.view(n, count, vocab_size)).argmax(dim=2)


def _uniforms(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """[n, count]: one number a position, used once: a position is judged again only if nothing
    that its number decided was kept."""
    place = positions[:, None] + torch.arange(count, device=positions.device)
    flat = uniform(seeds.repeat_interleave(count), place.flatten(), Purpose.ACCEPT, 1)
    return flat.view(-1, count)
