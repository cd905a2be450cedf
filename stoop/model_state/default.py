"""The state of models whose layers keep keys and values alone."""

from typing import Any

from stoop.attention.base import PagedMetadata
from stoop.batch.input_batch import InputBatch
from stoop.batch.staging import StagedWrites
from stoop.core.state import PagedState
from stoop.core.step import Admission
from stoop.graph.buffers import Buffer, Extent, Lifetime
from stoop.layers.stateful import StateContext
from stoop.model_state.base import Metadata, ModelStateSetup


class DefaultModelState:
    """Slots and block tables say which KV is live, so nothing needs doing when a request enters a
    slot or drafts are rejected: what is not counted is written over."""

    def __init__(self, setup: ModelStateSetup) -> None:
        self.setup = setup
        self.backend = setup.backend
        self.graph_support = setup.backend.graph_support

    def admit(self, staged: StagedWrites, admission: Admission) -> None:
        pass

    def prepare_attn(self, batch: InputBatch, for_capture: bool = False) -> Metadata:
        plan = self.backend.build(batch, for_capture)
        return {PagedState: PagedMetadata(self.backend, plan, batch.slot_mapping)}

    def can_advance(self) -> bool:
        return self.backend.advance is not None

    def advance(self, metadata: Metadata) -> None:
        assert self.backend.advance is not None
        self.backend.advance(metadata[PagedState].plan)

    def commit(self) -> None:
        pass

    def context(self, metadata: Metadata) -> StateContext:
        return StateContext(self.setup.states, metadata)

    def metadata_buffers(self) -> list[Buffer]:
        return [
            Buffer(name, tensor, Lifetime.STEP) for name, tensor in self.backend.buffers().items()
        ]

    def state_buffers(self) -> list[Buffer]:
        return [
            buffer
            for index, state in enumerate(self.setup.states)
            for buffer in _state_buffers(index, state)
        ]


def _state_buffers(index: int, state: Any) -> list[Buffer]:
    if isinstance(state, dict):
        return [
            Buffer(f"state {index} {name}", tensor, Lifetime.SLOT, Extent.SLOTS)
            for name, tensor in state.items()
        ]
    return [Buffer(f"kv_cache {index}", state, Lifetime.SLOT, Extent.BLOCKS)]
