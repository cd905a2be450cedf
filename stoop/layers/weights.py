"""Where each tensor of a checkpoint goes.

A module lists its checkpoint tensors with views into its own, possibly fused, parameters. Loading
copies each straight into its view; nothing is concatenated in between.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn


class WeightSlot(NamedTuple):
    name: str  # in the checkpoint
    view: Tensor


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter in the default dtype and device, to be filled by a loader."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def prefixed(prefix: str, slots: Iterator[WeightSlot]) -> Iterator[WeightSlot]:
    for slot in slots:
        yield WeightSlot(f"{prefix}.{slot.name}", slot.view)
