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


@dataclass(frozen=True)
class CapturedAttentionState:
    """The attention metadata and KV slots that one captured graph reads, by identity."""

    metadata: Any
    slot_mapping: Tensor  # [num_tokens] int64


Prepare = Callable[[BatchExecutionDescriptor], CapturedAttentionState]
Run = Callable[[BatchExecutionDescriptor, CapturedAttentionState], None]


class CudaGraphManager:
    """Holds one program a descriptor. The backend may be CUDA's or the tape."""

    def __init__(
        self, backend: GraphBackend, descriptors: Iterable[BatchExecutionDescriptor]
    ) -> None:
        self.backend = backend
        self.descriptors = list(descriptors)
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
            run(descriptor, prepare(descriptor))
            state = prepare(descriptor)
            self._programs[descriptor] = self._capture_one(run, descriptor, state)
            states[descriptor] = state
            if report:
                report("capturing graphs", done + 1, len(self.descriptors))
        if states:
            log.info(
                "captured %d graphs in %.1f s, %.1f MiB",
                len(states),
                time.perf_counter() - started,
                self.backend.num_bytes / 2**20,
            )
        return states

    def dispatch(self, shape: BatchShape) -> BatchExecutionDescriptor:
        return self._dispatcher.dispatch(shape)

    def replay(self, descriptor: BatchExecutionDescriptor, context: Any = None) -> None:
        self._programs[descriptor].replay(context)

    def _capture_one(
        self, run: Run, descriptor: BatchExecutionDescriptor, state: CapturedAttentionState
    ) -> Program:
        self.capturing = True
        try:
            return self.backend.capture(lambda: run(descriptor, state))
        finally:
            self.capturing = False


def _capture_order(descriptor: BatchExecutionDescriptor) -> tuple[bool, int]:
    return (descriptor.mode is not RunMode.PIECEWISE, -descriptor.num_tokens)
