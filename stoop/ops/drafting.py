"""Phases P and D: a drafter's inputs out of slot state, and its drafts back into it.

All inputs follow from slot state: how many tokens are known and how many drafts follow them. So the
draft decodes of a step are one program that runs several times, and the host never needs to know
how many drafts were accepted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.ops.dispatch import op
from stoop.ops.inputs import RowTensors, SlotTensors, StepTensors, token_rows
from stoop.ops.random import Purpose, gumbel_at
from stoop.ops.sampling import DrawTensors, filter_, temper_


@dataclass(frozen=True)
class PrefillTensors:
    """Inputs of phase P that are not the target's."""

    token_ids: Tensor  # [max_tokens] int32: the token after each position; dead tokens 0
    last_token_indices: Tensor  # [max_reqs] int64: index of each row's last valid token; padding 0
    room: Tensor  # [max_reqs] int64: the most drafts each row may have; padding 0


@op("step.row_slots")
def draft_room(slots: SlotTensors, step: StepTensors, position_limit: int) -> Tensor:
    """[max_reqs] int64: the most drafts that each row may have after its known tokens.

    0 for rows that sample nothing. Otherwise at most what the request wants, what can be accepted
    before it ends, and what the drafter has positions for.
    """
    slot = step.row_slots
    known = slots.num_tokens[slot]
    room = torch.minimum(slots.draft_limit[slot], slots.token_limit[slot] - 1 - known)
    room = torch.minimum(room, position_limit - known).clamp(min=0)
    return room * step.samples


@op("step.row_slots", native=True)
def prepare_draft_prefill(
    slots: SlotTensors,
    rows: RowTensors,
    step: StepTensors,
    out: PrefillTensors,
    position_limit: int,
) -> None:
    """Write the token ids shifted by one, each row's last valid index, and its room.

    vLLM: _prepare_eagle_inputs_kernel.
    Each position gets the known token that follows it: a sampled one, or the next of the prompt.
    Positions after a rejected draft are dead.
    """
    out.room.copy_(draft_room(slots, step, position_limit))
    _, row = token_rows(rows.query_start_loc, out.token_ids.shape[0])
    slot = step.row_slots[row]
    following = step.positions + 1
    live = (step.slot_mapping >= 0) & (following < slots.num_tokens[slot])
    following = torch.where(live, following, 0)
    out.token_ids.copy_(torch.where(live, slots.token_ids[slot, following], 0))
    starts = rows.query_start_loc.long()[:-1]
    last = starts + slots.num_computed[step.row_slots] - 1 - step.context_lens
    last = torch.maximum(last, starts)  # a row that has failed may have no valid token
    out.last_token_indices.copy_(torch.where(step.samples > 0, last, 0))


@op("step.row_slots", native=True)
def prepare_draft_decode(
    slots: SlotTensors,
    rows: RowTensors,
    step: StepTensors,
    room: Tensor,
    block_size: int,
    query_start_loc: Tensor,
    out: StepTensors,
) -> None:
    """Write the inputs of a draft decode: one token per row, its newest draft.

    A row without room stays in the batch, attends to its first token only and writes no KV.
    room: [max_reqs] int64; query_start_loc: [max_reqs + 1] int32, written
    out: the fields that are not written here are shared with `step`
    """
    slot, live = step.row_slots, rows.idx_mapping >= 0
    drafted = slots.num_drafts[slot]
    active = drafted < room
    newest = slots.num_tokens[slot] - 1 + drafted
    newest = torch.where(active, newest, 0)
    position = (newest - 1).clamp(min=0)
    out.input_ids.copy_(torch.where(active, slots.token_ids[slot, newest], 0))
    out.positions.copy_(position)
    out.context_lens.copy_(position)
    out.seq_lens.copy_(torch.where(live, position + 1, 0))
    blocks = slots.block_table[slot, position // block_size].long()
    out.slot_mapping.copy_(torch.where(active, blocks * block_size + position % block_size, -1))
    rank = torch.arange(query_start_loc.shape[0], device=slot.device)
    query_start_loc.copy_(torch.minimum(rank, live.sum()))


@op("logits", kernel_module="coupling")
def draw_as_target(
    logits: Tensor,
    slots: SlotTensors,
    step: StepTensors,
    how: DrawTensors,
    d2t: Tensor | None,
    filters: bool,
) -> Tensor:
    """[n] int64: each row's next draft, drawn with the noise that will draw the target's token.

    The shared noise favours the same tokens in both draws: the closer the two distributions are,
    the more often they agree. At temperature 0 the draft is the argmax.
    logits: [n, draft vocabulary] of the first n rows, overwritten
    filters: whether any row has min-p, top-k or top-p
    """
    slot = step.row_slots[: logits.shape[0]]
    temperature = how.temperature[slot]
    if filters:
        filter_(logits, how.temperature, how.min_p, how.top_k, how.top_p, slot)
    else:
        temper_(logits, temperature)
    places = slots.num_tokens[slot] + slots.num_drafts[slot]
    numbers = torch.arange(logits.shape[1], device=logits.device)
    if d2t is not None:
        numbers = numbers + d2t
    noise = gumbel_at(how.seeds[slot], places, Purpose.SAMPLE, numbers)
    return (logits + noise * (temperature > 0)[:, None]).argmax(dim=1)


@op("token_ids", native=True)
def commit_draft(
    slots: SlotTensors,
    step: StepTensors,
    room: Tensor,
    token_ids: Tensor,
    d2t: Tensor | None = None,
) -> Tensor:
    """Append one draft to each row that has room; return its index among the drafts, [n] int64.

    token_ids: [n] int64 for the first n rows; rows without room get index -1
    d2t: [draft vocabulary] int64, target id minus draft id, if the ids are of a draft vocabulary
    """
    if d2t is not None:
        token_ids = token_ids + d2t[token_ids]
    count = token_ids.shape[0]
    slot, drafted = step.row_slots[:count], slots.num_drafts[step.row_slots[:count]]
    active = drafted < room[:count]
    writer = torch.where(active, slot, slots.sink)
    where = (slots.num_tokens[writer] + slots.num_drafts[writer]) * active
    slots.token_ids[writer, where] = (token_ids * active).to(slots.token_ids.dtype)
    slots.num_drafts.index_add_(0, slot, active.long())
    return torch.where(active, drafted, -1)


@op("room", native=True)
def look_up_ngrams(
    slots: SlotTensors, step: StepTensors, room: Tensor, sizes: tuple[int, int], count: int
) -> None:
    """Find the longest n-gram that ends a row's tokens and occurs earlier, and draft what followed.

    sizes: smallest and largest n; count: the most drafts of a row. Of several occurrences of the
    same n the earliest is used.
    """
    least, most = sizes
    slot = step.row_slots
    history = slots.token_ids[slot].long()  # [max_reqs, max_model_len]
    width, known = history.shape[1], slots.num_tokens[slot]
    place = torch.arange(width, device=slot.device)
    # How many tokens up to each place equal the row's last ones.
    equal = torch.ones_like(history, dtype=torch.bool)
    run = torch.zeros_like(history)
    for back in range(most):
        tail = history.gather(1, (known - 1 - back).clamp(min=0)[:, None])
        shifted = history.roll(back, dims=1)
        equal = equal & (shifted == tail) & (place >= back) & (known > back)[:, None]
        run = run + equal
    run = torch.where((place < (known - 1)[:, None]) & (run >= least), run, 0)
    best, where = run.max(dim=1)
    # `max` may return any of several equal ones; the first is wanted.
    where = torch.where(run == best[:, None], place, width).amin(dim=1).clamp(max=width - 1)
    found = torch.minimum(room, known - 1 - where) * (best > 0)
    number = torch.arange(count, device=slot.device)
    taken = number < found[:, None]  # [max_reqs, count]
    drafts = history.gather(1, (where[:, None] + 1 + number).clamp(max=width - 1))
    writer = torch.where(taken, slot[:, None], slots.sink)
    target = (known[:, None] + number).clamp(max=width - 1)
    slots.token_ids[writer, target] = torch.where(taken, drafts, 0).to(slots.token_ids.dtype)
    slots.num_drafts[slot] = found
