"""Captured programs on a CUDA device."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stoop.graph.tape import HostFunction

Piece = Callable[[Any], object]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaProgram:
    """Graphs to replay, with Python calls between them."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def __len__(self) -> int:
        return len(self.pieces)

    @torch.inference_mode()
    def replay(self, context: Any = None) -> None:
        for piece in self.pieces:
            piece(context)


class CudaGraphBackend:
    """Captures with torch.cuda.CUDAGraph; all graphs share one memory pool."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self._program: CudaProgram | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.num_bytes = 0

    def capture(self, function: Callable[[], object]) -> CudaProgram:
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        self._program = CudaProgram()
        try:
            # Freeing a graph of an earlier engine during the capture would break it.
            with torch.inference_mode(), torch.cuda.stream(self.stream), _no_garbage_collection():
                self._begin()
                function()
                self._end()
            program = self._program
        except BaseException:
            self._abandon()
            raise
        finally:
            self._program = None
        torch.cuda.synchronize(self.device)
        self.num_bytes += max(0, torch.cuda.memory_reserved(self.device) - before)
        return program

    def host_call(self, function: HostFunction, *tensors: Tensor) -> None:
        """In a capture: end the graph here, leave this call to Python, and begin a new graph."""
        assert self._program is not None, "only while capturing"
        self._end()
        self._program.pieces.append(lambda context: function(context, *tensors))
        self._begin()

    def _abandon(self) -> None:
        """End a capture that failed, so that its stream can be used again."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError), torch.cuda.stream(self.stream):
                graph.capture_end()
            # torch still considers the failed capture to be allocating from the pool.
            self.pool = torch.cuda.graph_pool_handle()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self.pool)

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None and self._program is not None
        graph.capture_end()
        self._program.pieces.append(lambda context: graph.replay())
