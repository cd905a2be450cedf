"""Graphs of a drafter's two phases."""

import dataclasses
from typing import Any

from torch import Tensor

from stoop.checkpoint.report import Report
from stoop.core.sampling_kind import SamplingKind
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.dispatch import BatchShape, default_sizes
from stoop.graph.manager import CapturedAttentionState, CudaGraphManager, Prepare, Run
from stoop.graph.refusals import CaptureError


class PrefillEagleCudaGraphManager(CudaGraphManager):
    """Draft prefill, which has the target's shapes: one graph for each of the target's.

    It reads the very buffers that the target's builder refreshes, so that a replay needs no
    rebuild. Handed over is identity, never contents: they are made afresh for warm-up and capture.
    """

    name = "draft prefill"

    def capture_against(
        self,
        attn_states: dict[BatchExecutionDescriptor, CapturedAttentionState],
        prepare: Prepare,
        run: Run,
        report: Report | None = None,
    ) -> None:
        def prepare_same(descriptor: BatchExecutionDescriptor) -> CapturedAttentionState:
            if descriptor not in attn_states:
                known = ", ".join(map(str, attn_states)) or "nothing"
                raise CaptureError(
                    f"draft prefill wants the attention state of {descriptor}, and the target "
                    f"captured {known}"
                )
            fresh = prepare(descriptor)
            _check_identity(descriptor, attn_states[descriptor], fresh)
            return fresh

        self.capture(prepare_same, run, report)


class DecodeEagleCudaGraphManager(CudaGraphManager):
    """Draft decode: whole or eager, never in pieces, with as many tokens as requests."""

    name = "draft decode"

    def dispatch_rows(self, num_reqs: int) -> BatchExecutionDescriptor:
        return self.dispatch(BatchShape(num_reqs, num_reqs, True, SamplingKind.GREEDY))


def decode_descriptors(
    max_reqs: int, sizes: tuple[int, ...] | None
) -> list[BatchExecutionDescriptor]:
    """One token a request: its tokens are its requests, padded together."""
    wanted = default_sizes(max_reqs) if sizes is None else [n for n in sizes if n <= max_reqs]
    return [BatchExecutionDescriptor(RunMode.FULL, n, n, 1) for n in sorted(set(wanted))]


def _check_identity(
    descriptor: BatchExecutionDescriptor, old: CapturedAttentionState, new: CapturedAttentionState
) -> None:
    for name, tensor in _tensors(new).items():
        own = _tensors(old).get(name)
        if own is None or tensor.data_ptr() != own.data_ptr():
            raise CaptureError(
                f"draft prefill of {descriptor} would read another `{name}` than the target's: "
                "build both by one builder"
            )


def _tensors(state: CapturedAttentionState) -> dict[str, Tensor]:
    values: dict[str, Any] = {"slot_mapping": state.slot_mapping}
    if dataclasses.is_dataclass(state.metadata):
        for entry in dataclasses.fields(state.metadata):
            values[entry.name] = getattr(state.metadata, entry.name)
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
