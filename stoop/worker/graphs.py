"""The runner's phases as graphs: what is captured for each descriptor, and on which backend."""

from typing import TYPE_CHECKING, Any

import torch

from stoop.attention.base import ForwardContext
from stoop.attention.breaking import BreakingContext
from stoop.checkpoint.report import Report
from stoop.config.schema import Config
from stoop.graph.cuda import CudaGraphBackend
from stoop.graph.descriptor import BatchExecutionDescriptor, GraphMode, RunMode
from stoop.graph.dispatch import BatchShape
from stoop.graph.manager import CapturedAttentionState, CudaGraphManager, GraphBackend
from stoop.graph.plan import GraphLimits, plan_graphs
from stoop.graph.tape import TapeBackend
from stoop.sampling.sampler import SamplingNeeds
from stoop.spec.base import DraftStep

if TYPE_CHECKING:
    from stoop.worker.runner import ModelRunner


class StepGraphs:
    """Graphs of the target's forward pass and of whole steps; the drafter has its own beside."""

    def __init__(self, runner: "ModelRunner", config: Config) -> None:
        self.runner = runner
        self.max_model_len = config.schedule.max_model_len
        limits = GraphLimits(
            max_reqs=config.schedule.max_num_seqs,
            max_tokens=config.schedule.max_num_batched_tokens,
            query_len=config.schedule.query_len,
            sizes=config.graph.capture_sizes,
        )
        mode = GraphMode(config.graph.mode)
        descriptors = plan_graphs(mode, runner.backend.graph_support, limits)
        backend, watch = self._make_backend(), runner.sanitizer
        self.manager = CudaGraphManager(backend, descriptors, watch)
        self.attn_states: dict[BatchExecutionDescriptor, CapturedAttentionState] = {}
        if runner.speculator is not None:
            runner.speculator.init_cudagraph_manager(backend, watch)

    def _make_backend(self) -> GraphBackend:
        device = self.runner.device
        return CudaGraphBackend(device) if device.type == "cuda" else TapeBackend()

    @torch.inference_mode()
    def capture(self, report: Report | None = None) -> None:
        self.attn_states = self.manager.capture(self.prepare, self.run, report)
        if self.runner.speculator is not None:
            self.runner.speculator.capture(self.attn_states, self.prepare, report)

    def managers(self) -> list[CudaGraphManager]:
        """The target's and the drafter's."""
        speculator = self.runner.speculator
        return [self.manager, *(speculator.graph_managers() if speculator else [])]

    def dispatch(self, shape: BatchShape) -> BatchExecutionDescriptor:
        return self.manager.dispatch(shape)

    def replay(self, descriptor: BatchExecutionDescriptor, context: Any = None) -> None:
        self.manager.replay(descriptor, context)

    # ---- capture ----

    def prepare(self, descriptor: BatchExecutionDescriptor) -> CapturedAttentionState:
        """A batch of nothing but padding, and fresh metadata for it.

        Made outside the capture: loading rows is a copy from the host, which is not replayed.
        """
        runner, draft = self.runner, None
        if descriptor.mode is RunMode.STEP and runner.speculator is not None:
            draft = runner.speculator.prepare_step_graph(descriptor)
        num_reqs = 1 if descriptor.num_reqs is None else descriptor.num_reqs
        batch = runner.buffers.load_rows([], num_reqs, descriptor.num_tokens, descriptor.query_len)
        runner.inputs()
        metadata = runner.backend.build(batch, for_capture=True)
        return CapturedAttentionState(metadata, batch.slot_mapping, batch, draft)

    def run(self, descriptor: BatchExecutionDescriptor, state: CapturedAttentionState) -> None:
        """The phases that this descriptor's graph holds."""
        runner, batch = self.runner, state.batch
        if descriptor.mode is RunMode.STEP:
            runner.inputs()
        context: ForwardContext = runner.context(batch, state.metadata)
        if descriptor.mode is RunMode.PIECEWISE and self.manager.capturing:
            context = BreakingContext(self.manager.backend)
        runner.forward(batch, context)
        if descriptor.sampling is None:
            return
        needs = SamplingNeeds.of_kind(descriptor.sampling)
        runner.verify(batch, needs, self.max_model_len, runner.query_len)
        runner.update()
        if runner.speculator is not None:
            step = DraftStep(batch, descriptor, state.metadata, needs.kind)
            runner.speculator.draft_in_step_graph(step, state.draft)
