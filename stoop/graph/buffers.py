"""Persistent buffers, as their owners declare them: how long contents are valid, what is live.

Graphs read buffers by address. The sanitizer relies on these declarations alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from torch import Tensor


class Lifetime(Enum):
    """How long the contents of a buffer are valid."""

    CONSTANT = "constant"  # weights, tables
    SLOT = "slot"  # KV, recurrent state, block tables, request state
    STEP = "step"  # inputs, metadata, what one phase passes to another
    DRAFT = "draft"  # written again for each draft decode of a step


class Extent(Enum):
    """What the entries of a buffer belong to, which decides which of them a step leaves live."""

    TOKENS = "tokens"  # of the batch, along the first axis
    REQS = "requests"  # of the batch, along the first axis
    SLOTS = "slots"  # request slots, along the first axis; the last row is the sink of padding
    BLOCKS = "blocks"  # KV blocks, along the second axis
    SCRATCH = "scratch"  # no entry is live after the step


@dataclass(frozen=True)
class Buffer:
    name: str
    tensor: Tensor
    lifetime: Lifetime
    extent: Extent = Extent.SCRATCH
    padding: int | None = None  # what a step leaves past the live entries; None for anything
    # Reorders contents so that entries are along the first axis, if they are stored otherwise.
    unpack: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        kept = self.lifetime is not Lifetime.SLOT or self.extent in (Extent.SLOTS, Extent.BLOCKS)
        assert kept, f"`{self.name}` outlives its step: say by what it is kept, slots or blocks"

    def entries(self, contents: Tensor) -> Tensor:
        """The entries along the first axis. contents: of the buffer, now or in a snapshot"""
        return contents if self.unpack is None else self.unpack(contents)

    def live(self, num_reqs: int, num_tokens: int) -> slice | None:
        """The entries that are live after a step, along the first axis; None if none are."""
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
    """A buffer for every tensor of a dataclass."""
    return [
        Buffer(f"{prefix}{field.name}", getattr(group, field.name), lifetime, extent)
        for field in fields(group)
    ]
