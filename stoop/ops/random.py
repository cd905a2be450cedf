"""Random numbers without state: Philox-4x32-10, keyed by (seed, purpose, position).

A number depends on its key and its index only, so it is the same in any batch, after a preemption
and on any device. Each purpose has its own stream, and no number serves two purposes. (A coupled
draft uses its token's numbers. It is a guess at that draw, and the text does not depend on it.)
"""

from enum import IntEnum

import torch
from torch import Tensor

from stoop.ops.dispatch import op

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 under 1


class Purpose(IntEnum):
    """Streams. Their numbers define what a seed gives: never change one."""

    SAMPLE = 0  # a token of the target's distribution, and the coupled draft for it
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four words from four counter words and two key words; all int64 holding 32 bits.

    A round works on two pairs of words: words 0 and 2 are multiplied and change places.
    """
    first, second = _pair(counter[0], counter[2]), _pair(counter[1], counter[3])
    first, second = torch.broadcast_tensors(first, second)
    multipliers, weyl = _constants(_MULTIPLIERS, first), _constants(_WEYL, first)
    keys = _pair(*key)
    for _ in range(_ROUNDS):
        # A product of two 32-bit words wraps around in int64, which keeps all 64 bits.
        crossed = (first * multipliers).flip(0)
        first = (crossed >> 32).bitwise_and_(_MASK).bitwise_xor_(second).bitwise_xor_(keys)
        second = crossed.bitwise_and_(_MASK)
        keys = (keys + weyl) & _MASK
    return first[0], second[0], first[1], second[1]


def _pair(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(a, b))


def _constants(values: tuple[int, int], like: Tensor) -> Tensor:
    """[2, 1 ...]: made on the device, because a graph does not capture a copy from the host."""
    number = torch.arange(2, device=like.device).view(2, *[1] * (like.dim() - 1))
    return number * (values[1] - values[0]) + values[0]


@op("seeds")
def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose, count: int) -> Tensor:
    """[n, count] float32 in (0, 1): row i for seed i at position i.

    seeds, positions: [n] int64. Number j is word j % 4 of counter j // 4.
    The kernel returns the same bits.
    """
    groups = torch.arange(-(-count // 4), device=seeds.device)
    return _to_uniform(_words(seeds, positions, purpose, groups).flatten(1)[:, :count])


def _words(seeds: Tensor, positions: Tensor, purpose: Purpose, groups: Tensor) -> Tensor:
    """[n, groups, 4] int64: the words of each counter."""
    position = positions[:, None] & _MASK
    zero = torch.zeros_like(position)
    key = (seeds[:, None] & _MASK, (seeds[:, None] >> 32) & _MASK)
    words = philox((groups[None, :] + zero, position + zero, zero + int(purpose), zero), key)
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


def _to_uniform(bits: Tensor) -> Tensor:
    return ((bits.float() + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)


def gumbel(seeds: Tensor, positions: Tensor, purpose: Purpose, count: int) -> Tensor:
    """[n, count] float32 Gumbel noise: argmax(logits + noise) is a draw from softmax(logits).

    -log(-log(1 - u)): large values, which win, come from small u, which float32 resolves finely.
    """
    return _to_gumbel(uniform(seeds, positions, purpose, count))


def gumbel_at(seeds: Tensor, positions: Tensor, purpose: Purpose, numbers: Tensor) -> Tensor:
    """[n, m] float32 Gumbel noise at the indices `numbers` ([m] int64) of each stream."""
    words = _words(seeds, positions, purpose, numbers // 4)
    which = (numbers % 4).expand(words.shape[:2])[:, :, None]
    return _to_gumbel(_to_uniform(words.gather(2, which).squeeze(2)))


def _to_gumbel(uniform: Tensor) -> Tensor:
    return -torch.log(-torch.log1p(-uniform))
