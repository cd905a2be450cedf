"""What a drafter reads, made on the device from slot state, and where its drafts go.

Everything follows from slot state: how many tokens are known, how many drafts stand behind them. So
the draft decodes of a step are one and the same program run several times, and the host never needs
to know how many drafts were accepted.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoop.ops.inputs import RowTensors, SlotTensors, StepTensors, token_rows
from stoop.ops.kernels.choice import uses_kernels
from stoop.ops.random import Purpose, gumbel_at
from stoop.ops.sampling import DrawTensors, apply_min_p_, apply_top_k_top_p_, temper_


def kernels() -> Any:
    from stoop.ops.kernels import drafting

    return drafting


@dataclass(frozen=True)
class PrefillTensors:
    """Inputs of phase P beside the target's own."""

    token_ids: Tensor  # [max_tokens] int32: the token that follows each position; dead 0
    last_token_indices: Tensor  # [max_reqs] int64: each row's last true slot; padding 0
    room: Tensor  # [max_reqs] int64: drafts that each row may have; padding 0


def draft_room(slots: SlotTensors, step: StepTensors, position_limit: int) -> Tensor:
    """[max_reqs] int64: drafts that each row may have behind its known tokens now.

    None for rows that sample nothing; no more than its request wants, than can be accepted before
    it ends, and than the drafter has positions for.
    """
    if uses_kernels(step.row_slots):
        return kernels().draft_room(slots, step, position_limit)
    slot = step.row_slots
    known = slots.num_tokens[slot]
    room = torch.minimum(slots.draft_limit[slot], slots.token_limit[slot] - 1 - known)
    room = torch.minimum(room, position_limit - known).clamp(min=0)
    return room * step.samples


def prepare_draft_prefill(
    slots: SlotTensors,
    rows: RowTensors,
    step: StepTensors,
    out: PrefillTensors,
    position_limit: int,
) -> None:
    """Ids shifted by one: known tokens follow every position but the newest, sampled ones and the
    next token of a prompt among them. Slots behind a rejected draft are dead."""
    if uses_kernels(step.row_slots):
        kernels().prepare_draft_prefill(slots, rows, step, out, position_limit)
        return
    out.room.copy_(draft_room(slots, step, position_limit))
    _, row = token_rows(rows.query_start_loc, out.token_ids.shape[0])
    slot = step.row_slots[row]
    following = step.positions + 1
    live = (step.slot_mapping >= 0) & (following < slots.num_tokens[slot])
    following = torch.where(live, following, 0)
    out.token_ids.copy_(torch.where(live, slots.token_ids[slot, following], 0))
    starts = rows.query_start_loc.long()
    last = starts[:-1] + slots.num_computed[step.row_slots] - 1 - step.context_lens
    out.last_token_indices.copy_(torch.where(step.samples > 0, last, 0))


def prepare_draft_decode(
    slots: SlotTensors,
    rows: RowTensors,
    step: StepTensors,
    room: Tensor,
    block_size: int,
    query_start_loc: Tensor,
    out: StepTensors,
) -> None:
    """One token a row: the newest draft, one place behind the one before it.

    A row with no room left keeps its place and looks at its first token alone; it writes nothing.
    room: [max_reqs] int64; query_start_loc: [max_reqs + 1] int32, written; of `out` the rest is
    shared with `step`
    """
    if uses_kernels(step.row_slots):
        kernels().prepare_draft_decode(slots, rows, step, room, block_size, query_start_loc, out)
        return
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


def draw_as_target(
    logits: Tensor,
    slots: SlotTensors,
    step: StepTensors,
    how: DrawTensors,
    d2t: Tensor | None,
    filters: bool,
) -> Tensor:
    """[n] int64: each row's next draft, drawn with the noise that will draw the target's token.

    Noise that favours a token favours it in both: the more alike their distributions are, the more
    often they pick the same. At temperature 0 it is the likeliest.
    logits: [n, draft vocabulary] of the first n rows, overwritten
    filters: whether any row has min-p, top-k or top-p
    """
    if uses_kernels(logits):
        from stoop.ops.kernels import coupling

        return coupling.draw_as_target(logits, slots, step, how, d2t, filters)
    slot = step.row_slots[: logits.shape[0]]
    temperature = how.temperature[slot]
    temper_(logits, temperature)
    if filters:
        apply_min_p_(logits, how.min_p[slot])
        apply_top_k_top_p_(logits, how.top_k[slot], how.top_p[slot], logits.shape[1])
    places = slots.num_tokens[slot] + slots.num_drafts[slot]
    numbers = torch.arange(logits.shape[1], device=logits.device)
    if d2t is not None:
        numbers = numbers + d2t
    noise = gumbel_at(how.seeds[slot], places, Purpose.SAMPLE, numbers)
    return (logits + noise * (temperature > 0)[:, None]).argmax(dim=1)


def commit_draft(
    slots: SlotTensors,
    step: StepTensors,
    room: Tensor,
    token_ids: Tensor,
    d2t: Tensor | None = None,
) -> Tensor:
    """Put one more draft behind each row that has room; returns [n] int64, its number there.

    token_ids: [n] int64 for the first n rows; with `d2t`, numbers of a draft vocabulary, which has
    how far each lies from the target's. Rows without room are numbered -1.
    """
    if uses_kernels(token_ids):
        return kernels().commit_draft(slots, step, room, token_ids, d2t)
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


def look_up_ngrams(
    slots: SlotTensors, step: StepTensors, room: Tensor, sizes: tuple[int, int], count: int
) -> None:
    """Draft what once followed the longest earlier repetition of a row's last tokens.

    sizes: fewest and most tokens that must repeat; count: most drafts of a row. Of several
    repetitions of one length the earliest counts.
    """
    if uses_kernels(room):
        kernels().look_up_ngrams(slots, step, room, sizes, count)
        return
    least, most = sizes
    slot = step.row_slots
    history = slots.token_ids[slot].long()  # [max_reqs, max_model_len]
    width, known = history.shape[1], slots.num_tokens[slot]
    place = torch.arange(width, device=slot.device)
    # How many tokens up to each place equal as many at the end.
    equal = torch.ones_like(history, dtype=torch.bool)
    run = torch.zeros_like(history)
    for back in range(most):
        tail = history.gather(1, (known - 1 - back).clamp(min=0)[:, None])
        shifted = history.roll(back, dims=1)
        equal = equal & (shifted == tail) & (place >= back) & (known > back)[:, None]
        run = run + equal
    run = torch.where((place < (known - 1)[:, None]) & (run >= least), run, 0)
    best, where = run.max(dim=1)
    # argmax does not promise the first of equals.
    where = torch.where(run == best[:, None], place, width).amin(dim=1).clamp(max=width - 1)
    found = torch.minimum(room, known - 1 - where) * (best > 0)
    number = torch.arange(count, device=slot.device)
    taken = number < found[:, None]  # [max_reqs, count]
    drafts = history.gather(1, (where[:, None] + 1 + number).clamp(max=width - 1))
    writer = torch.where(taken, slot[:, None], slots.sink)
    target = (known[:, None] + number).clamp(max=width - 1)
    slots.token_ids[writer, target] = torch.where(taken, drafts, 0).to(slots.token_ids.dtype)
    slots.num_drafts[slot] = found
