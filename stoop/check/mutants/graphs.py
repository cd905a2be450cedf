"""Bugs in the target's graphs."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stoop.attention import reference
from stoop.attention.hostplan import HostPlanBackend
from stoop.batch import input_batch
from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.check.mutants.base import Mutant, Patch
from stoop.core.step import PlannedRow
from stoop.graph.descriptor import BatchExecutionDescriptor
from stoop.graph.dispatch import BatchShape, Dispatcher
from stoop.graph.manager import CudaGraphManager
from stoop.graph.phases import Segment
from stoop.model_state.default import DefaultModelState
from stoop.ops import inputs as input_ops
from stoop.ops import rope
from stoop.ops.library import register
from stoop.spec.base import Pass
from stoop.worker.executor import PhaseExecutor
from stoop.worker.target import Target, TargetLane


def share_warm_up_state(patch: Patch) -> None:
    """Mechanism 4: what warm-up planned is not planned again inside the graph."""
    capture = CudaGraphManager.capture

    def shared(self: CudaGraphManager, descriptor: Any, prepare: Any, run: Any) -> Any:
        state = prepare()
        return capture(self, descriptor, lambda: state, run)

    patch.setattr(CudaGraphManager, "capture", shared)


def skip_the_rebuild(patch: Patch) -> None:
    """Mechanisms 1 and 2: the plan of the capture serves every replay."""
    plan = HostPlanBackend._plan
    seen: set[int] = set()

    def stale(self: HostPlanBackend, batch: InputBatch, max_seq_len: int) -> None:
        if not batch.num_reqs or id(self) not in seen:
            seen.add(id(self))
            plan(self, batch, max_seq_len)

    patch.setattr(HostPlanBackend, "_plan", stale)


def leave_index_pointers_unpadded(patch: Patch) -> None:
    """Mechanism 3: the tail keeps what a larger batch left."""
    copy_in = HostPlanBackend._plan

    def unpadded(self: HostPlanBackend, batch: InputBatch, max_seq_len: int) -> None:
        tail = self.page_indptr[batch.num_reqs + 1 :].clone()
        copy_in(self, batch, max_seq_len)
        self.page_indptr[batch.num_reqs + 1 :] = tail

    patch.setattr(HostPlanBackend, "_plan", unpadded)


def leave_row(name: str) -> Callable[[Patch], None]:
    """Mechanism 3 for one of the step's buffers: only live rows are written."""

    def apply(patch: Patch) -> None:
        prepare = input_ops.prepare_inputs

        def unpadded(slots: Any, rows: Any, out: Any, block_size: int) -> None:
            target = getattr(out, name)
            live = int((rows.idx_mapping >= 0).sum())
            count = live if target.shape[0] == rows.idx_mapping.shape[0] else None
            end = count if count is not None else int(rows.query_start_loc[-1])
            tail = target[end:].clone()
            prepare(slots, rows, out, block_size)
            target[end:] = tail

        patch.setattr(input_batch, "prepare_inputs", unpadded)

    return apply


def leave_idx_mapping_unpadded(patch: Patch) -> None:
    """Such a row has no query tokens, but sets back the counters of the slot that it names."""
    load = InputBuffers.load_rows

    def unpadded(self: InputBuffers, rows: list[PlannedRow], *sizes: Any, **key: Any) -> Any:
        tail = self.rows.idx_mapping[len(rows) :].clone()
        batch = load(self, rows, *sizes, **key)
        if rows:
            self.rows.idx_mapping[len(rows) :] = tail
        return batch

    patch.setattr(InputBuffers, "load_rows", unpadded)


def pass_max_model_len(patch: Patch) -> None:
    """Mechanism 5: the model's limit, not the batch's bound, to a backend that walks it."""
    build = HostPlanBackend.build

    def wide(self: HostPlanBackend, batch: InputBatch, for_capture: bool = False) -> Any:
        bounds = np.full_like(batch.seq_lens_cpu_upper_bound, self.setup.max_model_len)
        return build(self, replace(batch, seq_lens_cpu_upper_bound=bounds), for_capture)

    patch.setattr(HostPlanBackend, "build", wide)


def pass_max_model_len_anywhere(patch: Patch) -> None:
    """The same for any backend: those that do not walk bounds must not mind."""
    prepare = DefaultModelState.prepare_attn

    def wide(self: DefaultModelState, batch: InputBatch, for_capture: bool = False) -> Any:
        limit = self.setup.slots.token_ids.shape[1]
        bounds = np.full_like(batch.seq_lens_cpu_upper_bound, limit)
        return prepare(self, replace(batch, seq_lens_cpu_upper_bound=bounds), for_capture)

    patch.setattr(DefaultModelState, "prepare_attn", wide)


def bake_the_plan(patch: Patch) -> None:
    """A host value in the graph: Python makes the plan while capturing, and its tensors escape the
    capture."""
    patch.setattr(reference, "plan_tiles", _python_plan)


def _python_plan(*args: Any) -> None:
    _, context_lens, seq_lens, row_slots, table, _, dtype, window, handle = args
    owner = reference._BACKENDS[handle]
    lengths = reference.Lengths(np.array([1]), np.array([0]), np.array([1]))
    rows = reference.RowState(context_lens, seq_lens, row_slots, table)
    planner = reference._Planner(lengths, rows, owner.block_size, window)
    owner.plans[window] = planner.tiles(dtype)


def after_capture(patch: Patch, change: Callable[[Target], None]) -> None:
    """Changes the target once all graphs are captured."""
    capture = PhaseExecutor.capture

    def changed(self: PhaseExecutor, report: Any = None) -> None:
        capture(self, report)
        assert isinstance(self.target, TargetLane)
        change(self.target.target)

    patch.setattr(PhaseExecutor, "capture", changed)


def reallocate_a_buffer(patch: Patch) -> None:
    """After capture the step writes a new tensor; the graph goes on reading the old one."""

    def move(target: Target) -> None:
        step = target.buffers.step
        target.buffers.step = replace(step, slot_mapping=step.slot_mapping.clone())

    after_capture(patch, move)


def move_a_weight(patch: Patch) -> None:
    """A weight is loaded again after capture: graphs go on with the old one."""

    def move(target: Target) -> None:
        weight = target.model.norm.weight
        weight.data = weight.data.clone()

    after_capture(patch, move)


def store_dead_tokens(patch: Patch) -> None:
    """A padded row writes its KV into block 0."""

    patch.setattr(rope, "store_kv", _store_kv_unmasked())


@functools.cache
def _store_kv_unmasked() -> Any:
    """An operation can be registered only once."""

    @register("store_kv_unmasked(Tensor k, Tensor v, Tensor(a!) cache, Tensor slot_mapping) -> ()")
    def store(k: Any, v: Any, cache: Any, slot_mapping: Any) -> None:
        for part, fresh in zip(cache.flatten(1, 2), (k, v), strict=True):
            part.index_copy_(0, slot_mapping.clamp(min=0), fresh)

    return store


def alias_live_slot(patch: Patch) -> None:
    """Padding points at a live slot instead of at nothing."""
    prepare = input_ops.prepare_inputs

    def aliased(slots: Any, rows: Any, out: Any, block_size: int) -> None:
        prepare(slots, rows, out, block_size)
        first = out.slot_mapping[:1].clamp(min=0)
        out.slot_mapping.copy_(torch.where(out.slot_mapping < 0, first, out.slot_mapping))

    patch.setattr(input_batch, "prepare_inputs", aliased)


def choose_a_smaller_graph(patch: Patch) -> None:
    """A batch is replayed in a graph that holds only some of its rows."""
    dispatch = Dispatcher.dispatch

    def smaller(self: Dispatcher, shape: BatchShape) -> BatchExecutionDescriptor:
        if shape.decode and shape.num_reqs > 2:
            shape = replace(shape, num_reqs=2, num_tokens=2)
        return dispatch(self, shape)

    patch.setattr(Dispatcher, "dispatch", smaller)


def bake_the_length_of_history(patch: Patch) -> None:
    """The captured sampler sees as much history as the batch of the capture had: none."""
    verify = Target.verify

    def baked(self: Target, run: Pass) -> None:
        with Patch() as inner:
            if not run.batch.plan_rows:
                inner.setattr(self, "max_model_len", 1)
            verify(self, run)

    patch.setattr(Target, "verify", baked)


def forget_the_update(patch: Patch) -> None:
    """The graph of a step lacks a phase that eager steps have."""
    run = PhaseExecutor._run_captured

    def without(self: PhaseExecutor, manager: Any, segment: Segment, *rest: Any) -> None:
        kept = tuple(phase for phase in segment.phases if phase.name != "U")
        run(self, manager, replace(segment, phases=kept), *rest)

    patch.setattr(PhaseExecutor, "_run_captured", without)


MUTANTS = (
    Mutant(
        "shared warm-up and capture state",
        share_warm_up_state,
        "full",
        buffer="plan_version",
        mechanism=4,
        report=42444,
    ),
    Mutant(
        "shared warm-up and capture state",
        share_warm_up_state,
        "step",
        buffer="plan_version",
        mechanism=4,
        report=42444,
    ),
    Mutant("plan not refreshed", skip_the_rebuild, "full", "hostplan", "page_indptr", mechanism=2),
    Mutant(
        "plan not refreshed", skip_the_rebuild, "piecewise", "hostplan", "page_indptr", mechanism=2
    ),
    Mutant(
        "index pointers unpadded",
        leave_index_pointers_unpadded,
        "full",
        "hostplan",
        "page_indptr",
        by_equality=False,
        mechanism=3,
    ),
    Mutant(
        "slots unpadded",
        leave_row("slot_mapping"),
        "full",
        buffer="slot_mapping",
        mechanism=3,
        any_backend=True,
    ),
    Mutant(
        "ids unpadded",
        leave_row("input_ids"),
        "full",
        buffer="input_ids",
        by_equality=False,
        mechanism=3,
        any_backend=True,
    ),
    Mutant(
        "positions unpadded",
        leave_row("positions"),
        "full",
        buffer="positions",
        by_equality=False,
        mechanism=3,
        any_backend=True,
    ),
    Mutant(
        "lengths unpadded",
        leave_row("seq_lens"),
        "full_and_piecewise",
        "hostplan",
        "seq_lens",
        by_equality=False,
        mechanism=3,
    ),
    Mutant(
        "rows unpadded",
        leave_idx_mapping_unpadded,
        "step",
        buffer="idx_mapping",
        mechanism=3,
        any_backend=True,
    ),
    Mutant(
        "max_model_len at run time",
        pass_max_model_len,
        "full",
        "hostplan",
        by_equality=False,
        mechanism=5,
        report=43991,
    ),
    Mutant("a plan made by the host", bake_the_plan, "full", mechanism=2),
    Mutant(
        "a buffer that moved",
        reallocate_a_buffer,
        "full",
        buffer="slot_mapping",
        mechanism=1,
        any_backend=True,
    ),
    Mutant(
        "a weight that moved",
        move_a_weight,
        "full",
        buffer="norm.weight",
        by_equality=False,
        any_backend=True,
    ),
    Mutant("dead tokens stored in block 0", store_dead_tokens, "full", by_equality=False),
    Mutant(
        "padding aliases a live slot",
        alias_live_slot,
        "full",
        buffer="slot_mapping",
        any_backend=True,
    ),
    Mutant("a graph too small", choose_a_smaller_graph, "full_decode_only", any_backend=True),
    Mutant(
        "a baked length of history",  # kernels read it on the device
        bake_the_length_of_history,
        "step",
        buffer="verdict",
    ),
    Mutant(
        "a phase missing in the graph",
        forget_the_update,
        "step",
        any_backend=True,
        buffer="token_ids",
    ),
)
