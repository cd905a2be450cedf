"""Captured programs of one segment, by descriptor."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode


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
    """Looks on while graphs are captured and replayed: the sanitizer."""

    def learn(self, key: Any, function: Callable[[], object]) -> None:
        """Run what a capture runs, and remember what its graph will rely on."""
        ...

    def check_reads(self, key: Any, reader: str) -> None:
        """Refuse a replay that would read what this step has not refreshed."""
        ...

    def begin_draft_decode(self) -> None:
        """What was derived for the draft before is stale from here on."""
        ...


State = TypeVar("State")


class CudaGraphManager:
    """Holds one program a descriptor. The backend may be CUDA's or the tape."""

    def __init__(
        self,
        backend: GraphBackend,
        name: str = "",
        title: str = "",
        watch: GraphWatch | None = None,
    ) -> None:
        self.backend = backend
        self.name = name  # of the segment
        self.title = title  # in messages
        self.watch = watch
        self.capturing = False  # and not warming up
        self._programs: dict[BatchExecutionDescriptor, Program] = {}

    @property
    def descriptors(self) -> list[BatchExecutionDescriptor]:
        return list(self._programs)

    def holds(self, descriptor: BatchExecutionDescriptor) -> bool:
        return descriptor in self._programs

    def capture(
        self,
        descriptor: BatchExecutionDescriptor,
        prepare: Callable[[], State],
        run: Callable[[State], None],
    ) -> State:
        """Returns the state that the graph reads.

        Warm-up has a state of its own: what a backend plans lazily in it must be planned again
        inside the graph.
        """
        self._run_watched(descriptor, functools.partial(run, prepare()))
        state = prepare()
        self.capturing = True
        try:
            self._programs[descriptor] = self.backend.capture(
                lambda: self._run_watched(descriptor, functools.partial(run, state))
            )
        finally:
            self.capturing = False
        return state

    def replay(
        self, descriptor: BatchExecutionDescriptor, context: Any = None, part: str = ""
    ) -> None:
        """`part` tells one of several replays in a step from the others."""
        if self.watch is not None:
            label = f"{self.title}{part}, " if self.title else ""
            self.watch.check_reads((self.name, descriptor), f"{label}{descriptor}")
        self._programs[descriptor].replay(context)

    def _run_watched(
        self, descriptor: BatchExecutionDescriptor, function: Callable[[], None]
    ) -> None:
        """What a graph reads is learnt from its capture, or, as stateful layers between pieces run
        outside it, from the warm-up of a piecewise one."""
        pieces = descriptor.mode is RunMode.PIECEWISE
        if self.watch is None or self.capturing == pieces:
            function()
        else:
            self.watch.learn((self.name, descriptor), function)
