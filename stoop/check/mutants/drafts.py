"""Bugs in draft prefill and draft decodes.

Stale drafts leave answers right, so equality means that of drafts, position by position.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stoop.attention.hostplan import HostPlanBackend
from stoop.attention.reference import ReferenceBackend
from stoop.batch.input_batch import InputBatch
from stoop.check.mutants.base import Patch, draft_mutant
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.manager import CudaGraphManager
from stoop.ops import drafting
from stoop.spec.base import Pass
from stoop.spec.decode_lane import DraftDecodeLane
from stoop.spec.eagle import EagleSpeculator
from stoop.worker.executor import PhaseExecutor

# ---- mechanism 2: metadata of each draft decode ----


def plan_only_the_first_decode(patch: Patch) -> None:
    """The plan of the first draft decode serves the others."""
    build = DraftDecodeLane._build_draft_attn_metadata

    def stale(self: DraftDecodeLane, target: InputBatch, descriptor: Any, number: int) -> Any:
        if number == 1 or descriptor.mode is RunMode.NONE or not target.num_reqs:
            return build(self, target, descriptor, number)
        return None

    patch.setattr(DraftDecodeLane, "_build_draft_attn_metadata", stale)


def do_not_advance(patch: Patch) -> None:
    """The tile plan of the first draft decode serves the others in the graph."""
    patch.setattr(ReferenceBackend, "advance", lambda self, metadata: None)


def prepare_inputs_once(patch: Patch) -> None:
    """Positions, slots and lengths stay those of the first draft decode."""
    run, prepare = PhaseExecutor._run_captured, EagleSpeculator._prepare_decode_inputs

    def once(self: PhaseExecutor, *args: Any) -> None:
        done: list[bool] = []

        def first(speculator: EagleSpeculator) -> None:
            if not done:
                done.append(True)
                prepare(speculator)

        with Patch() as inner:
            inner.setattr(EagleSpeculator, "_prepare_decode_inputs", first)
            run(self, *args)

    patch.setattr(PhaseExecutor, "_run_captured", once)


def keep_the_lengths_of_the_capture(patch: Patch) -> None:
    """Draft decodes attend by the lengths that the buffers had when their graph was captured."""
    prepare = drafting.prepare_draft_decode

    def stale(slots: Any, rows: Any, step: Any, *rest: Any) -> None:
        out = rest[-1]
        captured = out.seq_lens.clone(), out.context_lens.clone()
        prepare(slots, rows, step, *rest)
        out.seq_lens.copy_(captured[0])
        out.context_lens.copy_(captured[1])

    patch.setattr(drafting, "prepare_draft_decode", stale)


# ---- mechanism 3: padding ----


def leave_features_unpadded(patch: Patch) -> None:
    """Rows past the prefill's keep the features of an earlier step."""
    prefill = EagleSpeculator.prefill

    def unpadded(self: EagleSpeculator, run: Pass) -> None:
        tail = self.features[run.batch.num_reqs_padded :].clone()
        prefill(self, run)
        self.features[run.batch.num_reqs_padded :].copy_(tail)

    patch.setattr(EagleSpeculator, "prefill", unpadded)


def leave_unpadded(name: str, group: str) -> Callable[[Patch], None]:
    """Only the live part of a buffer that a drafting phase fills is written."""

    def apply(patch: Patch) -> None:
        function = f"prepare_draft_{group}"
        prepare = getattr(drafting, function)

        def unpadded(slots: Any, rows: Any, step: Any, *rest: Any) -> None:
            out = rest[-2] if name == "query_start_loc" else getattr(_output(group, rest), name)
            before = out.clone()
            prepare(slots, rows, step, *rest)
            live = _live(name, group, rows, step)
            shape = [-1] + [1] * (out.dim() - 1)
            out.copy_(torch.where(live[: out.shape[0]].view(shape), out, before))

        patch.setattr(drafting, function, unpadded)

    return apply


def _output(group: str, rest: tuple[Any, ...]) -> Any:
    return rest[0] if group == "prefill" else rest[-1]


def _live(name: str, group: str, rows: Any, step: Any) -> torch.Tensor:
    by_token = group == "prefill" and name == "token_ids"
    if by_token:
        return step.slot_mapping >= 0
    live = rows.idx_mapping >= 0
    return torch.cat((live.new_ones(1), live)) if name == "query_start_loc" else live


def let_padding_draft_for_slot_0(patch: Patch) -> None:
    """Padded rows count as rows of a live slot."""
    commit = drafting.commit_draft

    def aliased(slots: Any, step: Any, room: Any, *rest: Any) -> Any:
        row_slots = torch.where(step.row_slots == slots.sink, 0, step.row_slots)
        roomy = torch.where(step.row_slots == slots.sink, 1, room)
        return commit(slots, replace(step, row_slots=row_slots), roomy, *rest)

    patch.setattr(drafting, "commit_draft", aliased)


def store_kv_of_inactive_rows(patch: Patch) -> None:
    """A row with no room writes its KV at its first position."""
    prepare = drafting.prepare_draft_decode

    def storing(slots: Any, rows: Any, step: Any, *rest: Any) -> None:
        prepare(slots, rows, step, *rest)
        out, block_size = rest[-1], rest[1]
        place = slots.block_table[step.row_slots, 0].long() * block_size
        live = rows.idx_mapping >= 0
        out.slot_mapping.copy_(torch.where(live & (out.slot_mapping < 0), place, out.slot_mapping))

    patch.setattr(drafting, "prepare_draft_decode", storing)


# ---- mechanism 4: warm-up and capture apart ----


def share_warm_up_state(patch: Patch) -> None:
    """What warm-up planned is not planned again inside the graph."""
    capture = CudaGraphManager.capture

    def shared(self: CudaGraphManager, descriptor: Any, prepare: Any, run: Any) -> Any:
        if self.name != "D":
            return capture(self, descriptor, prepare, run)
        state = prepare()
        return capture(self, descriptor, lambda: state, run)

    patch.setattr(CudaGraphManager, "capture", shared)


def share_step_state(patch: Patch) -> None:
    """The same for the draft decodes in a graph of the whole step."""
    prepare = DraftDecodeLane.capture_state
    kept: dict[Any, Any] = {}

    def same(self: DraftDecodeLane, descriptor: BatchExecutionDescriptor) -> Any:
        state = prepare(self, descriptor)
        return kept.setdefault((id(self), descriptor), state)

    patch.setattr(DraftDecodeLane, "capture_state", same)


# ---- mechanism 5: bounds ----


def walk_to_max_model_len(patch: Patch) -> None:
    """The model's limit, not the batch's bound, as the longest sequence of a draft decode."""
    build = HostPlanBackend.build

    def wide(self: HostPlanBackend, batch: InputBatch, for_capture: bool = False) -> Any:
        one_each = batch.num_reqs and (batch.query_lens_cpu == 1).all()
        if one_each:
            bounds = np.full_like(batch.seq_lens_cpu_upper_bound, self.setup.max_model_len)
            batch = replace(batch, seq_lens_cpu_upper_bound=bounds)
        return build(self, batch, for_capture)

    patch.setattr(HostPlanBackend, "build", wide)


def forget_the_drafts_in_the_bound(patch: Patch) -> None:
    """The batch's own bound, without the drafts that follow it."""
    patch.setattr(
        DraftDecodeLane, "draft_max_seq_len", lambda self, target: max(target.max_seq_len - 3, 1)
    )


# ---- others ----


def after_capture(patch: Patch, change: Callable[[EagleSpeculator], None]) -> None:
    """Changes the drafter once all graphs are captured."""
    capture = PhaseExecutor.capture

    def changed(self: PhaseExecutor, report: Any = None) -> None:
        capture(self, report)
        (prefill,) = (phase for phase in self.phases if phase.name == "P")
        change(prefill.run.__self__)  # type: ignore[attr-defined]

    patch.setattr(PhaseExecutor, "capture", changed)


def move_the_features(patch: Patch) -> None:
    """Draft prefill writes features to a new tensor; draft decodes go on reading the old one."""

    def move(speculator: EagleSpeculator) -> None:
        speculator.features = speculator.features.clone()

    after_capture(patch, move)


def move_a_weight(patch: Patch) -> None:
    """A weight of the head is loaded again after capture."""

    def move(speculator: EagleSpeculator) -> None:
        weight = speculator.head.norm.weight  # type: ignore[union-attr]
        weight.data = weight.data.clone()

    after_capture(patch, move)


def do_not_shift_the_ids(patch: Patch) -> None:
    """Each slot gets its own token instead of the one that follows."""
    prepare = drafting.prepare_draft_prefill

    def unshifted(slots: Any, rows: Any, step: Any, out: Any, limit: int) -> None:
        prepare(slots, rows, step, out, limit)
        out.token_ids.copy_(step.input_ids)

    patch.setattr(drafting, "prepare_draft_prefill", unshifted)


def forget_the_next_prompt_token(patch: Patch) -> None:
    """A chunk's last slot gets no token, as if the prompt ended there."""
    prepare = drafting.prepare_draft_prefill

    def forgetful(slots: Any, rows: Any, step: Any, out: Any, limit: int) -> None:
        prepare(slots, rows, step, out, limit)
        ends = rows.query_start_loc[1:].long() - 1
        chunk = (rows.idx_mapping >= 0) & (step.samples == 0)
        where = torch.where(chunk, ends, out.token_ids.shape[0] - 1)
        out.token_ids.index_fill_(0, where, 0)

    patch.setattr(drafting, "prepare_draft_prefill", forgetful)


def draft_after_rejected_tokens(patch: Patch) -> None:
    """The last slot of a row, rejected or not, gives the first draft."""
    prepare = drafting.prepare_draft_prefill

    def careless(slots: Any, rows: Any, step: Any, out: Any, limit: int) -> None:
        prepare(slots, rows, step, out, limit)
        last = rows.query_start_loc[:-1] + step.seq_lens - step.context_lens - 1
        out.last_token_indices.copy_(torch.where(step.samples > 0, last, 0))

    patch.setattr(drafting, "prepare_draft_prefill", careless)


MUTANTS = (
    draft_mutant(
        "only the first decode planned",
        plan_only_the_first_decode,
        "full",
        "hostplan",
        "draft page_indptr",
        mechanism=2,
        report=38311,
        drafter="eagle-right",
        num_drafts=8,
    ),
    draft_mutant(
        "plan not advanced",
        do_not_advance,
        "full",
        mechanism=2,
        report=38311,
        buffer="draft features",
    ),
    draft_mutant(
        "plan not advanced",
        do_not_advance,
        "step",
        mechanism=2,
        report=38311,
        buffer="draft features",
    ),
    draft_mutant(
        "lengths of the capture",
        keep_the_lengths_of_the_capture,
        "full",
        mechanism=2,
        report=38311,
        any_backend=True,
        buffer="draft context_lens",
    ),
    draft_mutant(
        "lengths of the capture",
        keep_the_lengths_of_the_capture,
        "step",
        mechanism=2,
        report=38311,
        any_backend=True,
        buffer="draft context_lens",
    ),
    draft_mutant(
        "inputs of the first decode for all",
        prepare_inputs_once,
        "full",
        mechanism=2,
        any_backend=True,
        buffer="kv_cache 3",
    ),
    draft_mutant(
        "features unpadded",
        leave_features_unpadded,
        "full_decode_only",
        buffer="draft features",
        by_equality=False,
        mechanism=3,
    ),
    draft_mutant(
        "last indices unpadded",
        leave_unpadded("last_token_indices", "prefill"),
        "full",
        buffer="draft last_token_indices",
        mechanism=3,
        report=39773,
    ),
    draft_mutant(
        "ids unpadded",
        leave_unpadded("token_ids", "prefill"),
        "full",
        buffer="draft token_ids",
        by_equality=False,
        mechanism=3,
    ),
    draft_mutant(
        "slots unpadded",
        leave_unpadded("slot_mapping", "decode"),
        "full",
        buffer="draft slot_mapping",
        by_equality=False,
        mechanism=3,
        any_backend=True,
    ),
    draft_mutant(
        "lengths unpadded",
        leave_unpadded("seq_lens", "decode"),
        "full",
        "hostplan",
        buffer="draft seq_lens",
        by_equality=False,
        mechanism=3,
    ),
    draft_mutant(
        "offsets unpadded",
        leave_unpadded("query_start_loc", "decode"),
        "full",
        "hostplan",
        buffer="draft query_start_loc",
        mechanism=3,
    ),
    draft_mutant(
        "padding drafts for a live slot",
        let_padding_draft_for_slot_0,
        "full",
        by_sanitizer=False,
    ),
    draft_mutant(
        "KV of inactive rows",
        store_kv_of_inactive_rows,
        "full",
        by_sanitizer=False,
    ),
    draft_mutant(
        "shared warm-up and capture state",
        share_warm_up_state,
        "full",
        buffer="draft plan_version",
        mechanism=4,
        report=42444,
        num_drafts=2,
    ),
    draft_mutant(
        "shared warm-up and capture state",
        share_step_state,
        "step",
        buffer="draft plan_version",
        mechanism=4,
        report=42444,
        num_drafts=2,
    ),
    draft_mutant(
        "max_model_len at run time",
        walk_to_max_model_len,
        "full",
        "hostplan",
        by_equality=False,
        mechanism=5,
        report=43991,
    ),
    draft_mutant(
        "drafts forgotten in the bound",
        forget_the_drafts_in_the_bound,
        "full",
        "hostplan",
        mechanism=5,
        drafter="eagle-right",
    ),
    draft_mutant(
        "a buffer that moved",
        move_the_features,
        "full_decode_only",
        buffer="draft features",
        mechanism=1,
        any_backend=True,
    ),
    draft_mutant(
        "a weight that moved",
        move_a_weight,
        "full",
        buffer="draft norm.weight",
        by_equality=False,
        any_backend=True,
    ),
    draft_mutant("ids not shifted", do_not_shift_the_ids, "full", buffer="input_ids"),
    draft_mutant(
        "a chunk's next token forgotten",
        forget_the_next_prompt_token,
        "full",
        by_sanitizer=False,
        num_drafts=5,
    ),
    draft_mutant(
        "drafting after rejected tokens",
        draft_after_rejected_tokens,
        "full",
        by_sanitizer=False,
    ),
)
