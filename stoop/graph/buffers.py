"""Persistent buffers, as their owners declare them: how long contents hold, and which part is live.

Graphs read buffers by address. The sanitizer goes by these declarations alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from torch import Tensor


class Lifetime(Enum):
    CONSTANT = "constant"  # weights, tables
    SLOT = "slot"  # KV, recurrent state, block tables, request state
    STEP = "step"  # inputs, metadata, what phases hand over
    DRAFT = "draft"  # derived again for each draft decode of a step


class Extent(Enum):
    """What the entries of a buffer belong to, and so which of them a step leaves meaningful."""

    TOKENS = "tokens"  # of the batch, along the first axis
    REQS = "requests"  # of the batch, along the first axis
    SLOTS = "slots"  # request slots, along the first axis; the last row is the sink of padding
    BLOCKS = "blocks"  # KV blocks, along the second axis
    SCRATCH = "scratch"  # none outlives the step


@dataclass(frozen=True)
class Buffer:
    name: str
    tensor: Tensor
    lifetime: Lifetime
    extent: Extent = Extent.SCRATCH
    padding: int | None = None  # what a step leaves past the live entries; None: anything
    # Its entries along the first axis, where they are stored in another order.
    unpack: Callable[[Tensor], Tensor] | None = None

    def entries(self, contents: Tensor) -> Tensor:
        """contents: of the buffer, now or in a snapshot"""
        return contents if self.unpack is None else self.unpack(contents)

    def live(self, num_reqs: int, num_tokens: int) -> slice | None:
        """Of the first axis: entries that count after a step; None: none do."""
        if self.extent is Extent.SCRATCH:
            return None
        ends = {
            Extent.TOKENS: num_tokens,
            Extent.REQS: num_reqs,
            Extent.SLOTS: self.tensor.shape[0] - 1,
            Extent.BLOCKS: None,
        }
        return slice(ends[self.extent])


def field_buffers(
    group: Any, lifetime: Lifetime, extent: Extent = Extent.SCRATCH, prefix: str = ""
) -> list[Buffer]:
    """One for every tensor of a dataclass."""
    return [
        Buffer(f"{prefix}{field.name}", getattr(group, field.name), lifetime, extent)
        for field in fields(group)
    ]
