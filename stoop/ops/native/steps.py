"""Kernels of the phases around the forward pass, for CPUs: twins of torch references in `ops/`.

They compute whole numbers, and `greedy` an index, so they equal their references exactly and serve
every engine on a CPU of a process that has loaded the library.
"""

from ctypes import addressof

import torch
from torch import Tensor

from stoop.ops.drafting import PrefillTensors
from stoop.ops.inputs import RowTensors, SlotTensors, StepTensors, StopTensors
from stoop.ops.library import register
from stoop.ops.native import library as structs
from stoop.ops.native.calls import native


def _tensors(value: object) -> list[Tensor]:
    """The fields of a dataclass of tensors, in order."""
    return list(vars(value).values())


def _slots(tensors: list[Tensor]) -> structs.Slots:
    token_ids, block_table = tensors[0], tensors[-1]
    sizes = (token_ids.shape[0] - 1, token_ids.stride(0), block_table.stride(0))
    return structs.Slots(*(each.data_ptr() for each in tensors), *sizes)


def _rows(tensors: list[Tensor]) -> structs.Rows:
    idx_mapping, query_start_loc = tensors
    return structs.Rows(idx_mapping.data_ptr(), query_start_loc.data_ptr(), idx_mapping.shape[0])


def _step(tensors: list[Tensor]) -> structs.Step:
    return structs.Step(*(each.data_ptr() for each in tensors), tensors[0].shape[0])


# ---- phase I ----


def prepare_inputs(slots: SlotTensors, rows: RowTensors, out: StepTensors, block_size: int) -> None:
    _prepare_inputs(_tensors(slots), _tensors(rows), _tensors(out), block_size)


@register(
    "native_prepare_inputs(Tensor[] slots, Tensor[] rows, Tensor(a!)[] out, int block_size) -> ()"
)
def _prepare_inputs(
    slots: list[Tensor], rows: list[Tensor], out: list[Tensor], block_size: int
) -> None:
    a, b, c = _slots(slots), _rows(rows), _step(out)
    native().call.stoop_prepare_inputs(addressof(a), addressof(b), addressof(c), block_size)


# ---- phases V and U ----


def greedy(logits: Tensor, checks: bool = False) -> Tensor:
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _greedy(logits, checks, out)
    return out


@register("native_greedy(Tensor logits, bool checks, Tensor(a!) out) -> ()")
def _greedy(logits: Tensor, checks: bool, out: Tensor) -> None:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, width = logits.shape
    native().call.stoop_greedy(
        logits.data_ptr(), count, width, logits.stride(0), checks, out.data_ptr()
    )


def write_verdict(
    chosen: Tensor,
    accepts: Tensor | None,
    slots: SlotTensors,
    step: StepTensors,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_drafts: Tensor,
) -> None:
    outs = (token_ids, num_tokens, num_drafts)
    _write_verdict(chosen, accepts, _tensors(slots), _tensors(step), *outs)


@register(
    "native_write_verdict(Tensor chosen, Tensor? accepts, Tensor[] slots, Tensor[] step, "
    "Tensor(a!) token_ids, Tensor(b!) num_tokens, Tensor(c!) num_drafts) -> ()"
)
def _write_verdict(
    chosen: Tensor,
    accepts: Tensor | None,
    slots: list[Tensor],
    step: list[Tensor],
    token_ids: Tensor,
    num_tokens: Tensor,
    num_drafts: Tensor,
) -> None:
    chosen = chosen.contiguous()
    if accepts is not None:
        accepts = accepts.contiguous()
    a, b = _slots(slots), _step(step)
    native().call.stoop_write_verdict(
        chosen.data_ptr(),
        *chosen.shape,
        structs.address(accepts),
        addressof(a),
        addressof(b),
        *token_ids.shape,
        token_ids.data_ptr(),
        num_tokens.data_ptr(),
        num_drafts.data_ptr(),
    )


def commit_tokens(
    slots: SlotTensors,
    stops: StopTensors,
    rows: RowTensors,
    step: StepTensors,
    sampled: Tensor,
    num_sampled: Tensor,
) -> None:
    inputs = (_tensors(stops), _tensors(rows), _tensors(step))
    _commit_tokens(_tensors(slots), *inputs, sampled, num_sampled)


@register(
    "native_commit_tokens(Tensor(a!)[] slots, Tensor[] stops, Tensor[] rows, Tensor[] step, "
    "Tensor sampled, Tensor num_sampled) -> ()"
)
def _commit_tokens(
    slots: list[Tensor],
    stops: list[Tensor],
    rows: list[Tensor],
    step: list[Tensor],
    sampled: Tensor,
    num_sampled: Tensor,
) -> None:
    a, c, d = _slots(slots), _rows(rows), _step(step)
    b = structs.Stops(*(each.data_ptr() for each in stops), stops[2].stride(0))
    native().call.stoop_commit_tokens(
        addressof(a),
        addressof(b),
        addressof(c),
        addressof(d),
        sampled.data_ptr(),
        sampled.shape[1],
        num_sampled.data_ptr(),
    )


# ---- phases P and D ----


def prepare_draft_prefill(
    slots: SlotTensors,
    rows: RowTensors,
    step: StepTensors,
    out: PrefillTensors,
    position_limit: int,
) -> None:
    # Not all of `step`: the sanitizer takes what an operation is given as read.
    read = [step.positions, step.slot_mapping, step.context_lens, step.samples, step.row_slots]
    inputs = (_tensors(slots), _tensors(rows), read)
    _prepare_draft_prefill(*inputs, _tensors(out), position_limit)


@register(
    "native_prepare_draft_prefill(Tensor[] slots, Tensor[] rows, Tensor[] step, "
    "Tensor(a!)[] out, int position_limit) -> ()"
)
def _prepare_draft_prefill(
    slots: list[Tensor],
    rows: list[Tensor],
    step: list[Tensor],
    out: list[Tensor],
    position_limit: int,
) -> None:
    a, b = _slots(slots), _rows(rows)
    names = ("positions", "slot_mapping", "context_lens", "samples", "row_slots")
    addresses = {name: each.data_ptr() for name, each in zip(names, step, strict=True)}
    c = structs.Step(**addresses, max_tokens=step[0].shape[0])
    native().call.stoop_prepare_draft_prefill(
        addressof(a),
        addressof(b),
        addressof(c),
        position_limit,
        *(each.data_ptr() for each in out),
    )


def prepare_draft_decode(
    slots: SlotTensors,
    rows: RowTensors,
    step: StepTensors,
    room: Tensor,
    block_size: int,
    query_start_loc: Tensor,
    out: StepTensors,
) -> None:
    written = [out.input_ids, out.positions, out.slot_mapping, out.context_lens, out.seq_lens]
    _prepare_draft_decode(
        _tensors(slots), _tensors(rows), step.row_slots, room, block_size, query_start_loc, written
    )


@register(
    "native_prepare_draft_decode(Tensor[] slots, Tensor[] rows, Tensor row_slots, Tensor room, "
    "int block_size, Tensor(a!) query_start_loc, Tensor(b!)[] out) -> ()"
)
def _prepare_draft_decode(
    slots: list[Tensor],
    rows: list[Tensor],
    row_slots: Tensor,
    room: Tensor,
    block_size: int,
    query_start_loc: Tensor,
    out: list[Tensor],
) -> None:
    a, b = _slots(slots), _rows(rows)
    c = structs.Step(*(each.data_ptr() for each in out), max_tokens=out[0].shape[0])
    native().call.stoop_prepare_draft_decode(
        addressof(a),
        addressof(b),
        row_slots.data_ptr(),
        room.data_ptr(),
        block_size,
        query_start_loc.data_ptr(),
        addressof(c),
    )


def commit_draft(
    slots: SlotTensors,
    step: StepTensors,
    room: Tensor,
    token_ids: Tensor,
    d2t: Tensor | None = None,
) -> Tensor:
    out = torch.empty(token_ids.shape[0], dtype=torch.int64)
    _commit_draft(_tensors(slots), step.row_slots, room, token_ids, d2t, out)
    return out


@register(
    "native_commit_draft(Tensor(a!)[] slots, Tensor row_slots, Tensor room, Tensor token_ids, "
    "Tensor? d2t, Tensor(b!) out) -> ()"
)
def _commit_draft(
    slots: list[Tensor],
    row_slots: Tensor,
    room: Tensor,
    token_ids: Tensor,
    d2t: Tensor | None,
    out: Tensor,
) -> None:
    a = _slots(slots)
    native().call.stoop_commit_draft(
        addressof(a),
        row_slots.data_ptr(),
        room.data_ptr(),
        token_ids.data_ptr(),
        token_ids.shape[0],
        structs.address(d2t),
        out.data_ptr(),
    )


def look_up_ngrams(
    slots: SlotTensors, step: StepTensors, room: Tensor, sizes: tuple[int, int], count: int
) -> None:
    tokens = (slots.num_tokens, slots.token_ids, slots.num_drafts)
    _look_up_ngrams(step.row_slots, room, *sizes, count, *tokens)


@register(
    "native_look_up_ngrams(Tensor row_slots, Tensor room, int least, int most, int count, "
    "Tensor num_tokens, Tensor(a!) token_ids, Tensor(b!) num_drafts) -> ()"
)
def _look_up_ngrams(
    row_slots: Tensor,
    room: Tensor,
    least: int,
    most: int,
    count: int,
    num_tokens: Tensor,
    token_ids: Tensor,
    num_drafts: Tensor,
) -> None:
    named = {"num_tokens": num_tokens, "token_ids": token_ids, "num_drafts": num_drafts}
    addresses = {name: each.data_ptr() for name, each in named.items()}
    a = structs.Slots(**addresses, sink=token_ids.shape[0] - 1, width=token_ids.stride(0))
    native().call.stoop_look_up_ngrams(
        addressof(a), row_slots.data_ptr(), room.data_ptr(), row_slots.shape[0], least, most, count
    )
