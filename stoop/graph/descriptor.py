"""How a batch is executed: the modes, and the key of capture, lookup and logs."""

from dataclasses import dataclass
from enum import Enum, IntEnum

from stoop.core.sampling_kind import SamplingKind
from stoop.graph.support import GraphSupport


class RunMode(IntEnum):
    """How one batch runs, in order of how much of its step graphs hold."""

    NONE = 0  # eager
    PIECEWISE = 1  # graphs between attention calls
    FULL = 2  # one graph of the forward pass
    STEP = 3  # one graph of all phases


class GraphMode(Enum):
    """What a user chooses: a run mode for decode batches and one for all others."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"
    STEP = "step"

    def decode_mode(self, support: GraphSupport, query_len: int) -> RunMode:
        """For batches in which every request has `query_len` query tokens."""
        wanted = _DECODE[self]
        needed = GraphSupport.SINGLE_TOKEN if query_len == 1 else GraphSupport.UNIFORM
        if wanted >= RunMode.FULL and support < needed:
            # A decode batch may still run piecewise, if the mode allows it.
            return RunMode.NONE if self is GraphMode.FULL_DECODE_ONLY else RunMode.PIECEWISE
        return wanted

    def mixed_mode(self, support: GraphSupport) -> RunMode:
        """For batches with a prompt, or with unequal numbers of query tokens."""
        wanted = _MIXED[self]
        if wanted is RunMode.FULL and support < GraphSupport.ALWAYS:
            return RunMode.PIECEWISE
        return wanted


_DECODE = {
    GraphMode.NONE: RunMode.NONE,
    GraphMode.PIECEWISE: RunMode.PIECEWISE,
    GraphMode.FULL: RunMode.FULL,
    GraphMode.FULL_DECODE_ONLY: RunMode.FULL,
    GraphMode.FULL_AND_PIECEWISE: RunMode.FULL,
    GraphMode.STEP: RunMode.STEP,
}
_MIXED = {
    GraphMode.NONE: RunMode.NONE,
    GraphMode.PIECEWISE: RunMode.PIECEWISE,
    GraphMode.FULL: RunMode.FULL,
    GraphMode.FULL_DECODE_ONLY: RunMode.NONE,
    GraphMode.FULL_AND_PIECEWISE: RunMode.PIECEWISE,
    GraphMode.STEP: RunMode.FULL,
}


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    """A batch's padded shape and run mode. Equal descriptors mean the same graph.

    PIECEWISE pads tokens but not requests, and takes any query lengths.
    """

    mode: RunMode
    num_tokens: int
    num_reqs: int | None = None  # None for any
    query_len: int | None = None  # of every request; None for any
    sampling: SamplingKind | None = None  # set for STEP, whose graph includes the sampling
    masked: bool = False  # STEP graphs that apply masks of the host

    def __str__(self) -> str:
        parts = [self.mode.name, f"{self.num_tokens} tokens"]
        if self.num_reqs is not None:
            parts.append(f"{self.num_reqs} reqs")
        if self.query_len is not None:
            parts.append(f"{self.query_len} a request")
        if self.sampling is not None:
            parts.append(self.sampling.value)
        if self.masked:
            parts.append("masked")
        return " ".join(parts[:1]) + " " + ", ".join(parts[1:])
