"""The runner's phases as graphs: what is captured for each descriptor, and on which backend."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stoop.attention.base import AttentionShape, ForwardContext
from stoop.batch.input_batch import InputBatch
from stoop.checkpoint.report import Report
from stoop.config.schema import Config
from stoop.graph.cuda import CudaGraphBackend
from stoop.graph.descriptor import BatchExecutionDescriptor, GraphMode, RunMode
from stoop.graph.dispatch import BatchShape
from stoop.graph.manager import CapturedAttentionState, CudaGraphManager, GraphBackend
from stoop.graph.plan import GraphLimits, plan_graphs
from stoop.graph.tape import TapeBackend
from stoop.sampling.sampler import SamplingNeeds

if TYPE_CHECKING:
    from stoop.worker.runner import ModelRunner

DECODE_QUERY_LEN = 1  # query tokens of a request in a decode batch


class BreakingContext:
    """Attention in a piecewise capture: left to Python, on tensors of the graphs around it."""

    def __init__(self, backend: GraphBackend) -> None:
        self.backend = backend

    def attend(self, layer: int, shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape)

        def call(context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            out.copy_(context.attend(layer, shape, q, k, v))

        self.backend.host_call(call, q, k, v, out)
        return out


class StepGraphs:
    def __init__(self, runner: "ModelRunner", config: Config) -> None:
        self.runner = runner
        self.max_model_len = config.schedule.max_model_len
        limits = GraphLimits(
            max_reqs=config.schedule.max_num_seqs,
            max_tokens=config.schedule.max_num_batched_tokens,
            query_len=DECODE_QUERY_LEN,
            sizes=config.graph.capture_sizes,
        )
        mode = GraphMode(config.graph.mode)
        descriptors = plan_graphs(mode, runner.backend.graph_support, limits)
        self.manager = CudaGraphManager(self._make_backend(), descriptors)
        self.attn_states: dict[BatchExecutionDescriptor, CapturedAttentionState] = {}
        self._batches: dict[BatchExecutionDescriptor, InputBatch] = {}

    def _make_backend(self) -> GraphBackend:
        device = self.runner.device
        return CudaGraphBackend(device) if device.type == "cuda" else TapeBackend()

    @torch.inference_mode()
    def capture(self, report: Report | None = None) -> None:
        self.attn_states = self.manager.capture(self.prepare, self._run_watched, report)

    def dispatch(self, shape: BatchShape) -> BatchExecutionDescriptor:
        return self.manager.dispatch(shape)

    def replay(self, descriptor: BatchExecutionDescriptor, context: Any = None) -> None:
        self.manager.replay(descriptor, context)

    # ---- capture ----

    def prepare(self, descriptor: BatchExecutionDescriptor) -> CapturedAttentionState:
        """A batch of nothing but padding, and fresh metadata for it."""
        batch = self._pad(descriptor)
        self.runner.inputs()
        metadata = self.runner.backend.build(batch, for_capture=True)
        return CapturedAttentionState(metadata, batch.slot_mapping)

    def _run_watched(
        self, descriptor: BatchExecutionDescriptor, state: CapturedAttentionState
    ) -> None:
        """Under the sanitizer, learn what the graph reads: from its capture, or, as attention
        between pieces runs outside it, from the warm-up of a piecewise one."""
        sanitizer = self.runner.sanitizer
        pieces = descriptor.mode is RunMode.PIECEWISE
        if sanitizer is None or self.manager.capturing == pieces:
            self.run(descriptor, state)
        else:
            sanitizer.watch(descriptor, lambda: self.run(descriptor, state))

    def run(self, descriptor: BatchExecutionDescriptor, state: CapturedAttentionState) -> None:
        """The phases that this descriptor's graph holds."""
        runner, batch = self.runner, self._batches[descriptor]
        if descriptor.mode is RunMode.PIECEWISE:
            self._run_pieces(batch, state)
            return
        if descriptor.mode is RunMode.STEP:
            runner.inputs()
        runner.forward(batch, runner.context(batch, state.metadata))
        if descriptor.sampling is not None:
            needs = SamplingNeeds.of_kind(descriptor.sampling)
            runner.verify(batch, needs, self.max_model_len)
            runner.update()

    def _run_pieces(self, batch: InputBatch, state: CapturedAttentionState) -> None:
        runner = self.runner
        if self.manager.capturing:
            runner.forward(batch, BreakingContext(self.manager.backend))
        else:  # the warm-up
            runner.forward(batch, runner.context(batch, state.metadata))

    def _pad(self, descriptor: BatchExecutionDescriptor) -> InputBatch:
        """Made outside the capture: loading rows is a copy from the host, which is not replayed."""
        num_reqs = 1 if descriptor.num_reqs is None else descriptor.num_reqs
        batch = self.runner.buffers.load_rows([], num_reqs, descriptor.num_tokens)
        self._batches[descriptor] = batch
        return batch
