"""Capture of every descriptor at start, and replay by descriptor."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stoop.checkpoint.report import Report
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.dispatch import BatchShape, Dispatcher

log = logging.getLogger(__name__)


class Program(Protocol):
    """A captured program; `context` is for the calls that were left to Python."""

    def replay(self, context: Any = None) -> None: ...


class GraphBackend(Protocol):
    name: str

    @property
    def num_bytes(self) -> int:
        """Memory that captured programs hold."""
        ...

    def capture(self, function: Callable[[], object]) -> Program: ...

    def host_call(self, function: Callable[..., None], *tensors: Tensor) -> None:
        """In a capture: make this call by Python in every replay."""
        ...


class GraphWatch(Protocol):
    """Who looks on while graphs are captured and replayed; the sanitizer."""

    def learn(self, key: Any, function: Callable[[], object]) -> None:
        """Run what a capture runs, and remember what its graph will rely on."""
        ...

    def check_reads(self, key: Any, reader: str) -> None:
        """Refuse a replay that would read what nobody refreshed."""
        ...

    def begin_draft_decode(self) -> None:
        """What was derived for the draft before is stale from here on."""
        ...


@dataclass(frozen=True)
class CapturedAttentionState:
    """The attention metadata and KV slots that one captured graph reads, by identity."""

    metadata: Any
    slot_mapping: Tensor  # [num_tokens] int64
    batch: Any  # the padded view of the input buffers that goes with it
    draft: "CapturedAttentionState | None" = None  # of draft decodes in the same graph


Prepare = Callable[[BatchExecutionDescriptor], CapturedAttentionState]
Run = Callable[[BatchExecutionDescriptor, CapturedAttentionState], None]


class CudaGraphManager:
    """Holds one program a descriptor. The backend may be CUDA's or the tape."""

    name = ""  # of the phase in messages; the target has none

    def __init__(
        self,
        backend: GraphBackend,
        descriptors: Iterable[BatchExecutionDescriptor],
        watch: GraphWatch | None = None,
    ) -> None:
        self.backend = backend
        self.descriptors = list(descriptors)
        self.watch = watch
        self._dispatcher = Dispatcher(self.descriptors)
        self._programs: dict[BatchExecutionDescriptor, Program] = {}
        self.capturing = False  # and not warming up

    def capture(
        self, prepare: Prepare, run: Run, report: Report | None = None
    ) -> dict[BatchExecutionDescriptor, CapturedAttentionState]:
        """Pieces before whole graphs, largest first: what follows fits into the memory taken."""
        started = time.perf_counter()
        states = {}
        for done, descriptor in enumerate(sorted(self.descriptors, key=_capture_order)):
            # Warm-up has a state of its own: whatever a backend plans lazily in it must be
            # planned again inside the graph.
            self._run_watched(run, descriptor, prepare(descriptor))
            state = prepare(descriptor)
            self._programs[descriptor] = self._capture_one(run, descriptor, state)
            states[descriptor] = state
            if report:
                stage = f"capturing {self.name} graphs".replace("  ", " ")
                report(stage, done + 1, len(self.descriptors))
        if states:
            log.info(
                "captured %d %sgraphs in %.1f s, %.1f MiB",
                len(states),
                self.name and f"{self.name} ",
                time.perf_counter() - started,
                self.backend.num_bytes / 2**20,
            )
        return states

    def dispatch(self, shape: BatchShape) -> BatchExecutionDescriptor:
        return self._dispatcher.dispatch(shape)

    def holds(self, descriptor: BatchExecutionDescriptor) -> bool:
        return descriptor in self._programs

    def replay(
        self, descriptor: BatchExecutionDescriptor, context: Any = None, part: str = ""
    ) -> None:
        """`part` tells one of several replays in a step from the others."""
        if self.watch is not None:
            label = f"{self.name}{part}, " if self.name else ""
            self.watch.check_reads((self.name, descriptor), f"{label}{descriptor}")
        self._programs[descriptor].replay(context)

    def _capture_one(
        self, run: Run, descriptor: BatchExecutionDescriptor, state: CapturedAttentionState
    ) -> Program:
        self.capturing = True
        try:
            return self.backend.capture(lambda: self._run_watched(run, descriptor, state))
        finally:
            self.capturing = False

    def _run_watched(
        self, run: Run, descriptor: BatchExecutionDescriptor, state: CapturedAttentionState
    ) -> None:
        """What a graph reads is learnt from its capture, or, as attention between pieces runs
        outside it, from the warm-up of a piecewise one."""
        pieces = descriptor.mode is RunMode.PIECEWISE
        if self.watch is None or self.capturing == pieces:
            run(descriptor, state)
        else:
            self.watch.learn((self.name, descriptor), lambda: run(descriptor, state))


def _capture_order(descriptor: BatchExecutionDescriptor) -> tuple[bool, int]:
    return (descriptor.mode is not RunMode.PIECEWISE, -descriptor.num_tokens)
