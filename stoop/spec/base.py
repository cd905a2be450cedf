"""What the runner asks of whoever drafts."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stoop.attention.base import AttentionBackend
from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.checkpoint.report import Report
from stoop.config.schema import Config
from stoop.core.sampling_kind import SamplingKind
from stoop.graph.descriptor import BatchExecutionDescriptor
from stoop.graph.manager import (
    CapturedAttentionState,
    CudaGraphManager,
    GraphBackend,
    GraphWatch,
    Prepare,
)
from stoop.graph.sanitizer import Buffer
from stoop.ops.inputs import SlotTensors
from stoop.sampling.state import SamplingState


@dataclass(frozen=True)
class DraftSetup:
    """What a drafter shares with the target: state, buffers and cache, by identity."""

    config: Config
    slots: SlotTensors
    buffers: InputBuffers
    sampling: SamplingState
    kv_caches: list[Tensor]  # the target's layers, then the head's
    backend: AttentionBackend  # the target's
    draft_backend: AttentionBackend  # for draft decodes, with buffers of its own
    hidden: Tensor  # [max_tokens, hidden_size]: the target's normalised states
    taps: Tensor | None  # [max_tokens, num_taps, hidden_size]
    draft_logits: Tensor | None  # [slots + 1, K, vocab_size] float32: what drafts are drawn from


@dataclass(frozen=True)
class DraftStep:
    """A step as the drafter sees it, once its tokens are known."""

    batch: InputBatch
    descriptor: BatchExecutionDescriptor
    metadata: Any  # of the target's attention
    sampling: SamplingKind  # the least that serves all rows, or what a graph holds


class Speculator(Protocol):
    in_step_graph: bool  # whether a graph of the whole step holds all of its drafting

    def buffers(self) -> list[Buffer]:
        """Its persistent buffers, weights included."""
        ...

    def graph_managers(self) -> list[CudaGraphManager]:
        """Those of its own graphs."""
        ...

    def init_cudagraph_manager(self, backend: GraphBackend, watch: GraphWatch | None) -> None: ...

    def capture(
        self,
        attn_states: dict[BatchExecutionDescriptor, CapturedAttentionState],
        prepare: Prepare,
        report: Report | None = None,
    ) -> None:
        """Capture its own graphs against the target's attention states."""
        ...

    def prepare_step_graph(
        self, descriptor: BatchExecutionDescriptor
    ) -> CapturedAttentionState | None:
        """Fresh state for draft decodes inside a graph of the whole step; outside its capture."""
        ...

    def draft_in_step_graph(self, step: DraftStep, state: CapturedAttentionState | None) -> None:
        """The part of drafting that a graph of the whole step holds; captured, or its twin."""
        ...

    def refresh(self, batch: InputBatch) -> None:
        """Before a graph of the whole step is replayed: what the host plans for it."""
        ...

    def replays(self, step: DraftStep) -> bool:
        """Whether any graph of its own serves this step."""
        ...

    def propose(self, step: DraftStep, *, replay: bool = True) -> None:
        """Drafts behind each row's known tokens, into slot state.

        Without `replay`, the same phases run eagerly on the same padded extents.
        """
        ...
