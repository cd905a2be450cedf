"""The target's phases: inputs, forward, verify, update; and the buffers that they hand over."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.batch.request_state import RequestState
from stoop.config.schema import Config
from stoop.core.sampling_kind import SamplingKind
from stoop.graph.buffers import Buffer, Extent, Lifetime, field_buffers
from stoop.graph.descriptor import BatchExecutionDescriptor, GraphMode
from stoop.graph.dispatch import BatchShape, Dispatcher
from stoop.graph.phases import AttentionState, HostCall, Phase
from stoop.graph.plan import GraphLimits, max_mixed_size, plan_graphs
from stoop.layers.stateful import ForwardContext
from stoop.model_state.base import ModelState
from stoop.models.base import Model
from stoop.ops.inputs import PADDING, TOKEN_BUFFERS, commit_tokens
from stoop.ops.sampling import MaskTensors
from stoop.sampling.sampler import Positions, Sampler
from stoop.sampling.state import SamplingState
from stoop.sampling.verifier import Verdict, Verifier
from stoop.spec.base import Pass

MASK_BUFFERS = ("mask_bits", "mask_rows")  # the host writes them, for batches with a grammar


class Target:
    """Slot state, input buffers and what phases hand to each other.

    Phases I, C, V and U are functions over them; `phases` lists what each reads and writes.
    """

    def __init__(self, config: Config, model: Model, device: torch.device) -> None:
        schedule, dtype = config.schedule, getattr(torch, config.device.dtype)
        num_slots, max_tokens = schedule.max_num_seqs, schedule.max_num_batched_tokens
        self.model = model
        self.device = device
        self.block_size = config.cache.block_size
        self.max_model_len = schedule.max_model_len
        self.query_len = schedule.query_len
        self.state = RequestState(num_slots, schedule.max_model_len, self.block_size, device)
        self.sampling_state = SamplingState.make(num_slots, device)
        vocab_size = config.model.vocab_size
        self.masks = MaskTensors.make(num_slots, self.query_len, vocab_size, device)
        self.fill_masks: HostCall | None = None  # of batches with a grammar, before phase V
        sampler = Sampler(self.sampling_state, self.state.tensors, self.masks)
        self.verifier = Verifier(sampler, config.spec, vocab_size)
        self.buffers = InputBuffers(num_slots, max_tokens, device)
        size = config.model.hidden_size
        self.hidden = torch.zeros(max_tokens, size, dtype=dtype, device=device)
        self.verdict = Verdict.make(num_slots, self.query_len, device)
        self.tap_layers = config.head.taps if config.head else ()
        self.taps: Tensor | None = None
        if self.tap_layers:
            shape = (max_tokens, len(self.tap_layers), size)
            self.taps = torch.zeros(shape, dtype=dtype, device=device)
        self.model_state: ModelState  # made when the states' memory is there

    # ---- phases ----

    def phases(self) -> list[Phase]:
        rows, slots = {"idx_mapping", "query_start_loc"}, set(vars(self.state.tensors))
        step = set(vars(self.buffers.step))
        metadata = {buffer.name for buffer in self.model_state.metadata_buffers()}
        states = {buffer.name for buffer in self.model_state.state_buffers()}
        hidden = {"hidden"} if self.taps is None else {"hidden", "taps"}
        sampling = set(vars(self.sampling_state))
        drafts = set() if self.verifier.draft_logits is None else {"draft logits"}
        # Methods are looked up when a phase runs, so that tests can replace them.
        return [
            Phase("I", lambda run: self.inputs(), reads=rows | slots, writes=step),
            Phase(
                "C",
                lambda run: self.forward(run),
                reads=rows | step | slots | metadata | states,
                writes=hidden | metadata | states,
                forward=True,
            ),
            Phase(
                "V",
                lambda run: self.verify(run),
                reads=step | slots | sampling | drafts | {"hidden", *MASK_BUFFERS},
                writes={"verdict"},
                mask_call=self.fill_masks,
            ),
            Phase(
                "U",
                lambda run: self.update(),
                reads=rows | step | slots | sampling | states | {"verdict"},
                writes=slots | states,
            ),
        ]

    def inputs(self) -> None:
        """I: ids, positions, lengths and KV slots out of slot state."""
        self.buffers.fill(self.state.tensors, self.block_size)

    def forward(self, run: Pass) -> None:
        """C: hidden states of all tokens, and the streams that the drafter taps."""
        batch = run.batch
        hidden = self.hidden[: batch.num_tokens_padded]
        tapped = self.tap_layers if run.num_drafts else ()
        _, streams = self.model(batch.input_ids, batch.positions, run.context, tapped, hidden)
        if self.taps is not None and tapped:
            torch.stack(streams, dim=1, out=self.taps[: batch.num_tokens_padded])

    def verify(self, run: Pass) -> None:
        """V: logits after each row's newest token and after each of its drafts; which drafts are
        accepted, and the token that follows."""
        batch, needs = run.batch, run.needs
        width, max_seq_len = batch.query_len or self.query_len, self.max_model_len
        if not run.worst_case:
            width, max_seq_len = batch.num_places, batch.max_seq_len
        if width == batch.query_len:  # the very tokens of a decode batch; dead ones do no harm
            hidden = self.hidden[: batch.num_reqs_padded * width]
        else:
            token = batch.last_token_indices[:, None] + self._drafts_before(batch, width)
            hidden = self.hidden[token.flatten()]
        where = None
        if needs.kind is not SamplingKind.GREEDY:
            slot = batch.row_slots.repeat_interleave(width)
            known = self.state.tensors.num_tokens[slot]
            place = known + self._drafts_before(batch, width).flatten()
            where = Positions(slot, place, max_seq_len)
        self.verifier.verify(self.model.logits(hidden), batch, where, needs, self.verdict)

    def _drafts_before(self, batch: InputBatch, width: int) -> Tensor:
        """[num_reqs, width] int64: drafts before each position; past the last one, all."""
        number = torch.arange(width, device=self.device)
        return torch.minimum(number, batch.row_drafts[:, None])

    def update(self) -> None:
        """U: counters and token history, on the device; states drop what rejected drafts left."""
        verdict = self.verdict
        commit_tokens(
            self.state.tensors,
            self.sampling_state.stops,
            self.buffers.rows,
            self.buffers.step,
            verdict.token_ids,
            verdict.num_tokens,
        )
        self.model_state.commit()

    # ---- buffers ----

    def declare_buffers(self) -> list[Buffer]:
        found = [Buffer("hidden", self.hidden, Lifetime.STEP, Extent.TOKENS)]
        if self.taps is not None:
            found.append(Buffer("taps", self.taps, Lifetime.STEP, Extent.TOKENS))
        verdict, rows = self.verdict.packed, self._verdict_rows
        found.append(Buffer("verdict", verdict, Lifetime.STEP, Extent.REQS, unpack=rows))
        bits, of_rows = MASK_BUFFERS
        found.append(Buffer(bits, self.masks.bits, Lifetime.STEP))
        found.append(Buffer(of_rows, self.masks.rows, Lifetime.STEP, Extent.REQS))
        found += field_buffers(self.buffers.rows, Lifetime.STEP)
        for name, tensor in vars(self.buffers.step).items():
            extent = Extent.TOKENS if name in TOKEN_BUFFERS else Extent.REQS
            found.append(Buffer(name, tensor, Lifetime.STEP, extent, PADDING.get(name)))
        found += self.model_state.metadata_buffers()
        found += field_buffers(self.state.tensors, Lifetime.SLOT, Extent.SLOTS)
        found += field_buffers(self.sampling_state, Lifetime.SLOT, Extent.SLOTS)
        found += self.model_state.state_buffers()
        for name, weight in self.model.named_parameters():
            found.append(Buffer(name, weight.data, Lifetime.CONSTANT))
        return found

    def _verdict_rows(self, packed: Tensor) -> Tensor:
        """[max_reqs, K + 3]: a row's tokens and counts."""
        verdict = Verdict.of(packed, self.verdict.num_tokens.shape[0])
        counts = torch.stack((verdict.num_tokens, verdict.num_drafts), dim=1)
        return torch.cat((verdict.token_ids, counts), dim=1)


class TargetLane:
    """The target's batches: their graph sizes, and their state while graphs are captured."""

    def __init__(self, config: Config, target: Target) -> None:
        schedule = config.schedule
        self.target = target
        self.max_reqs = schedule.max_num_seqs
        limits = GraphLimits(
            max_reqs=schedule.max_num_seqs,
            max_tokens=schedule.max_num_batched_tokens,
            query_lens=tuple(count + 1 for count in schedule.draft_counts),
            sizes=config.graph.capture_sizes,
            max_default=config.graph.max_capture_size,
            max_mixed=_max_mixed(config, target.model),
            masked=config.graph.capture_structured,
        )
        mode, support = GraphMode(config.graph.mode), target.model_state.graph_support
        self.descriptors: Sequence[BatchExecutionDescriptor] = plan_graphs(mode, support, limits)
        self._dispatcher = Dispatcher(self.descriptors)

    def dispatch(self, shape: BatchShape) -> BatchExecutionDescriptor:
        return self._dispatcher.dispatch(shape)

    def capture_state(self, descriptor: BatchExecutionDescriptor) -> AttentionState:
        """A batch of padding alone, and fresh metadata for it; vLLM: prepare_inputs_to_capture.

        Made outside the capture: loading rows is a copy from the host, which is not replayed.
        """
        target = self.target
        num_reqs = 1 if descriptor.num_reqs is None else descriptor.num_reqs
        batch = target.buffers.load_rows([], num_reqs, descriptor.num_tokens, descriptor.query_len)
        target.inputs()
        state = target.model_state
        metadata = state.prepare_attn(batch, for_capture=True)
        declared = {buffer.name: buffer.tensor for buffer in state.metadata_buffers()}
        return AttentionState(batch, metadata, declared)

    def context(self, metadata: Any) -> ForwardContext:
        return self.target.model_state.context(metadata)


def _max_mixed(config: Config, model: Model) -> int:
    if not config.graph.more_for_prompts:
        return 0
    num_parameters = sum(weight.numel() for weight in model.parameters())
    max_tokens, half = config.schedule.max_num_batched_tokens, model.dtype.itemsize == 2
    return max_mixed_size(config.model.num_layers, num_parameters, max_tokens, half=half)
