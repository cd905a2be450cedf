"""Prompt lookup: drafts out of the text itself, found on the device."""

from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.checkpoint.report import Report
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.manager import (
    CapturedAttentionState,
    CudaGraphManager,
    GraphBackend,
    GraphWatch,
    Prepare,
)
from stoop.graph.sanitizer import Buffer
from stoop.ops.drafting import draft_room, look_up_ngrams
from stoop.spec.base import DraftSetup, DraftStep


class NgramSpeculator:
    """No weights, no KV and no graphs of its own: in a graph of the whole step, or eager."""

    in_step_graph = True

    def __init__(self, setup: DraftSetup) -> None:
        spec = setup.config.spec
        assert spec is not None
        self.setup = setup
        self.num_tokens = spec.num_tokens
        self.sizes = (spec.prompt_lookup_min, spec.prompt_lookup_max)
        self.max_model_len = setup.config.schedule.max_model_len

    def buffers(self) -> list[Buffer]:
        return []

    def graph_managers(self) -> list[CudaGraphManager]:
        return []

    def init_cudagraph_manager(self, backend: GraphBackend, watch: GraphWatch | None) -> None:
        pass

    def capture(
        self,
        attn_states: dict[BatchExecutionDescriptor, CapturedAttentionState],
        prepare: Prepare,
        report: Report | None = None,
    ) -> None:
        pass

    def prepare_step_graph(
        self, descriptor: BatchExecutionDescriptor
    ) -> CapturedAttentionState | None:
        return None

    def draft_in_step_graph(self, step: DraftStep, state: CapturedAttentionState | None) -> None:
        self._look_up()

    def refresh(self, batch: InputBatch) -> None:
        pass

    def replays(self, step: DraftStep) -> bool:
        return False

    def propose(self, step: DraftStep, *, replay: bool = True) -> None:
        if not (replay and step.descriptor.mode is RunMode.STEP):
            self._look_up()

    def _look_up(self) -> None:
        slots, step = self.setup.slots, self.setup.buffers.step
        room: Tensor = draft_room(slots, step, self.max_model_len)
        look_up_ngrams(slots, step, room, self.sizes, self.num_tokens)
