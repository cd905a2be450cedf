"""Captures and replays the programs of one segment, by descriptor."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.refusals import MissingGraph


class Program(Protocol):
    """A captured program; `context` is passed to the calls that were left to Python."""

    def replay(self, context: Any = None) -> None: ...


class GraphBackend(Protocol):
    name: str

    @property
    def num_bytes(self) -> int:
        """Memory that captured programs hold."""
        ...

    def capture(self, function: Callable[[], object]) -> Program: ...

    def host_call(self, function: Callable[..., None], *tensors: Tensor) -> None:
        """In a capture: have Python make this call in every replay."""
        ...


class GraphWatch(Protocol):
    """Observes captures and replays; the sanitizer implements it."""

    def learn(self, key: Any, function: Callable[[], object]) -> None:
        """Run what a capture runs, and record what its graph will read."""
        ...

    def check_reads(self, key: Any, reader: str) -> None:
        """Refuse a replay that would read what this step has not refreshed."""
        ...

    def begin_draft_decode(self) -> None:
        """From here on, what was derived for the previous draft is stale."""
        ...


State = TypeVar("State")


class CudaGraphManager:
    """Holds one program per descriptor, captured by CUDA graphs or the tape."""

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
        self.capturing = False  # False during warm-up
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
        """Warm up, then capture; returns the state that the graph reads.

        Warm-up has its own state: what a backend plans lazily in it must be planned again inside
        the graph. vLLM calls `prepare` and `run` together create_forward_fn.
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
        """Replay the program. part: distinguishes several replays in a step, in messages"""
        program = self._programs.get(descriptor)
        if program is None:
            raise MissingGraph(
                f"{self.title or self.name} has no graph of {descriptor}: capture it for every "
                "descriptor that batches are dispatched to"
            )
        if self.watch is not None:
            label = f"{self.title}{part}, " if self.title else ""
            self.watch.check_reads((self.name, descriptor), f"{label}{descriptor}")
        program.replay(context)

    def _run_watched(
        self, descriptor: BatchExecutionDescriptor, function: Callable[[], None]
    ) -> None:
        """Run, and let the watch learn what the graph reads: from its capture, or, for a piecewise
        graph, from the warm-up, because stateful layers run outside its capture."""
        pieces = descriptor.mode is RunMode.PIECEWISE
        if self.watch is None or self.capturing == pieces:
            function()
        else:
            self.watch.learn((self.name, descriptor), function)
