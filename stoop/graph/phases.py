"""A step as data: a list of phases, and how it is cut into graphs.

A phase is a function over persistent buffers with static shapes that makes no decision on the host.
A graph mode is a way of cutting the list: `cut` decides which phases form a segment, and whether
the segment is captured as a graph.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from stoop.graph.buffers import Buffer, Lifetime
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode

HostCall = Callable[[Any], None]  # gets the step's batch


@dataclass(frozen=True)
class AttentionState:
    """A batch and its attention metadata, the objects that a captured graph reads.

    vLLM: CapturedAttentionState.
    """

    batch: Any  # a padded view of the lane's input buffers
    metadata: Any
    # Persistent buffers that the metadata's builder declares, by name. Metadata may hide them.
    declared: Mapping[str, Tensor] = field(default_factory=dict)


class Lane(Protocol):
    """A kind of batch with its own input buffers, metadata and graph sizes.

    The target has one; draft decodes, with one token per row, have another.
    """

    name: str
    descriptors: Sequence[BatchExecutionDescriptor]  # sizes to capture

    @property
    def advances(self) -> bool:
        """Whether metadata can be updated from the lengths on the device, inside a graph."""
        ...

    def dispatch(self, num_reqs: int) -> BatchExecutionDescriptor:
        """The smallest captured size that fits, else an eager one."""
        ...

    def capture_state(self, descriptor: BatchExecutionDescriptor) -> AttentionState:
        """A batch of padding only and fresh metadata; created outside the capture."""
        ...

    def live_state(
        self, target: Any, descriptor: BatchExecutionDescriptor, number: int
    ) -> AttentionState:
        """The state of run `number` (from 1) of a step. target: the target's batch"""
        ...

    def advance(self, state: AttentionState) -> None:
        """Update the metadata for the lengths of the next run, on the device."""
        ...

    def context(self, state: AttentionState) -> Any:
        """The forward context of a pass on this state."""
        ...


@dataclass(frozen=True)
class Phase:
    """One part of a step. `reads` and `writes` name persistent buffers; `*` matches any text."""

    name: str
    run: Callable[[Any], None]
    reads: AbstractSet[str]
    writes: AbstractSet[str]
    forward: bool = False  # a pass through layers, which is worth its own graph
    lane: Lane | None = None  # None for the target's
    times: int = 1  # runs per step, each with its own metadata
    drafts: int = 0  # the first draft that it makes, counted from 1; 0: it is no part of drafting
    title: str = ""  # in messages
    host_call: HostCall | None = None  # called on the host right before it; graphs end there
    mask_call: HostCall | None = None  # the host call of masked batches alone

    def of_batch(self, masked: bool) -> "Phase":
        """The phase as a batch runs it, with or without a grammar."""
        if not masked or self.mask_call is None:
            return self
        return replace(self, host_call=self.mask_call)

    def for_drafts(self, num_drafts: int) -> "Phase | None":
        """The phase in a step that makes so many drafts; None if such a step leaves it out."""
        if self.drafts > num_drafts:
            return None
        if not self.drafts or self.lane is None:
            return self
        return replace(self, times=num_drafts - self.drafts + 1)

    @property
    def joins(self) -> bool:
        """Whether one graph can hold it together with the phases before it."""
        if self.host_call is not None:
            return False
        return self.lane is None or self.times == 1 or self.lane.advances


@dataclass(frozen=True)
class Segment:
    """Consecutive phases that run together, captured as one graph or eagerly."""

    phases: tuple[Phase, ...]
    captured: bool

    @cached_property
    def name(self) -> str:
        return "".join(phase.name for phase in self.phases)

    @property
    def title(self) -> str:
        return self.phases[0].title

    @cached_property
    def updates(self) -> bool:
        """Whether the step's tokens are known after it."""
        return any(phase.name == "U" for phase in self.phases)

    @cached_property
    def lane(self) -> Lane | None:
        """The lane that decides the size of its graph: that of its first phase."""
        return self.phases[0].lane

    @cached_property
    def host_call(self) -> HostCall | None:
        return self.phases[0].host_call


def cut(mode: RunMode, phases: Sequence[Phase], masked: bool = False) -> list[Segment]:
    """The segments of a step whose batch runs in `mode`. masked: some request has a grammar

    Eager steps have one segment per phase. PIECEWISE and FULL capture each forward pass. STEP
    captures all phases, in as few graphs as their host calls and lanes allow. A phase on another
    lane that joins no graph is captured if its lane has sizes to capture.
    """
    segments: list[Segment] = []
    for phase in (each.of_batch(masked) for each in phases):
        last = segments[-1] if segments else None
        if mode is RunMode.STEP and last and last.lane is None and phase.joins:
            segments[-1] = Segment((*last.phases, phase), captured=True)
        elif phase.lane is not None:
            segments.append(Segment((phase,), captured=bool(phase.lane.descriptors)))
        else:
            alone = phase.forward and mode in (RunMode.PIECEWISE, RunMode.FULL)
            segments.append(Segment((phase,), captured=alone or mode is RunMode.STEP))
    return segments


def undeclared(names: Iterable[str], declared: Iterable[str]) -> list[str]:
    """The names that no declaration covers."""
    patterns = list(declared)
    return sorted(
        name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def check_order(phases: Sequence[Phase], buffers: Sequence[Buffer], by_host: Iterable[str]) -> None:
    """Check that the host or an earlier phase writes every step buffer that a phase reads."""
    written = set(by_host)
    known = [buffer.name for buffer in buffers]
    for phase in phases:
        for pattern in (*phase.reads, *phase.writes):
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ValueError(f"phase {phase.name} names `{pattern}`, which is not a buffer")
        fresh = [b.name for b in buffers if b.lifetime in (Lifetime.STEP, Lifetime.DRAFT)]
        read = [n for n in fresh if any(fnmatchcase(n, p) for p in phase.reads)]
        missing = undeclared(read, (*written, *phase.writes))
        if missing:
            raise ValueError(
                f"phase {phase.name} reads `{missing[0]}`, which no earlier phase writes"
            )
        written |= phase.writes
