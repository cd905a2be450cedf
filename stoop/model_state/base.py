"""What an engine asks of a model's state, whatever its layers keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stoop.attention.base import AttentionBackend
from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.batch.staging import StagedWrites
from stoop.core.state import State, StateLayout
from stoop.core.step import Admission
from stoop.graph.buffers import Buffer
from stoop.graph.support import GraphSupport
from stoop.layers.stateful import ForwardContext
from stoop.ops.inputs import SlotTensors

# By kind of state (vLLM: attn_groups): what its layers read of one step.
Metadata = Mapping[type[State], Any]


@dataclass(frozen=True)
class ModelStateSetup:
    """What a model state is made of; all of it is shared by identity."""

    layout: StateLayout
    states: Sequence[Any]  # by layer: a tensor, or tensors by name
    backend: AttentionBackend
    slots: SlotTensors
    buffers: InputBuffers


class ModelState(Protocol):
    """The states of all layers, and how one step reads and moves them.

    A family whose layers keep more than KV brings its own (vLLM: MambaHybridModelState): see
    `Model.make_model_state`.
    """

    graph_support: GraphSupport  # batches whose passes a graph can hold

    def admit(self, staged: StagedWrites, admission: Admission) -> None:
        """A request enters a slot: stage the edits that make the slot's state its own."""
        ...

    def prepare_attn(self, batch: InputBatch, for_capture: bool = False) -> Metadata:
        """What layers read of one step, with persistent buffers written over their whole extent.

        With `for_capture`, bounds are the worst case that the graph must serve.
        """
        ...

    def can_advance(self) -> bool:
        """Whether `advance` works."""
        ...

    def advance(self, metadata: Metadata) -> None:
        """Make metadata fit lengths that have changed on the device; inside a graph, too."""
        ...

    def commit(self) -> None:
        """In phase U, after the step's tokens are counted: drop what rejected drafts left."""
        ...

    def context(self, metadata: Metadata) -> ForwardContext: ...

    def metadata_buffers(self) -> list[Buffer]:
        """What `prepare_attn` writes beside the batch's own buffers, or layers derive from it."""
        ...

    def state_buffers(self) -> list[Buffer]:
        """The states of all layers, and what is kept beside them by slot."""
        ...
