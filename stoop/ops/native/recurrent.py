"""Recurrences over a request's tokens, for CPUs: twins of the loops of delta nets and Mamba-2.

They are in float32 and sum in another order than torch, so they serve models with packed weights
only, like the other kernels that round (see `RMSNorm.packed`). They are called inside a registered
operation, which the tape runs again as a whole.
"""

from ctypes import addressof

import torch
from torch import Tensor

from stoop.ops.native.calls import native
from stoop.ops.native.library import Recurrence, address

LANES = 16
MAX_WIDTH = 256


def fits(matrix: Tensor, width: int, lanes: int) -> bool:
    """Whether the kernels have loops for a state of these sizes."""
    whole = width % LANES == 0 and lanes % LANES == 0
    return matrix.dtype == torch.float32 and whole and width <= MAX_WIDTH


def run_tokens(
    matrix: Tensor,
    old: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor, Tensor, Tensor],
    betas: Tensor | None = None,
    *,
    fresh: bool,
    logs: bool,
) -> tuple[Tensor, Tensor | None]:
    """Move a slot's state over logged tokens, then over new ones.

    matrix: delta nets [heads, width, lanes], Mamba-2 [heads, lanes, width]; holds the state before
    the new tokens if `logs`, else the one after them
    old: keys [pending, groups, width], updates [pending, heads, lanes], decays [pending, heads]
    new: keys, queries [count, groups, width], values [count, heads, lanes], decays [count, heads]
    betas: [count, heads], for a delta net
    returns outputs and, for a delta net, updates: [count, heads, lanes]
    """
    library = native()
    given = [each.contiguous() for each in (*old, *new)]
    old_keys, old_updates, old_decays, keys, queries, values, decays = given
    out = torch.empty_like(values)
    updates = None if betas is None else torch.empty_like(values)
    count, heads, lanes = values.shape
    assert matrix.is_contiguous() and all(each.dtype == torch.float32 for each in given)
    betas = None if betas is None else betas.contiguous()
    call = Recurrence(
        *(heads, keys.shape[1], keys.shape[2], lanes, old_keys.shape[0], count, fresh, logs),
        *(each.data_ptr() for each in (matrix, old_keys, old_updates, old_decays)),
        *(each.data_ptr() for each in (keys, queries, values, decays)),
        *(address(betas), address(updates), out.data_ptr()),
    )
    library.recurrence(library.team, addressof(call), betas is not None)
    return out, updates
