"""Phase V: which drafts are accepted, and the token after them.

All rows have K drafts and K + 1 positions. Position j of a row follows its known tokens and its
first j drafts, and verifies draft j. Arguments: `drafts` [n, K] int64, `num_drafts` [n] int64.
"""

import torch
from torch import Tensor

from stoop.ops.dispatch import op
from stoop.ops.inputs import SlotTensors, StepTensors
from stoop.ops.random import Purpose, gumbel, uniform


def count_accepted(accepts: Tensor, num_drafts: Tensor) -> Tensor:
    """[n] int64: the length of the unbroken run of accepted drafts. accepts: [n, K] bool"""
    number = torch.arange(accepts.shape[1], device=accepts.device)
    accepts = accepts & (number < num_drafts[:, None])
    return accepts.long().cumprod(dim=1).sum(dim=1)


def join_tokens(drafts: Tensor, num_accepted: Tensor, chosen: Tensor) -> Tensor:
    """[n, K + 1] int64: accepted drafts, then the token chosen after them, then zeros.

    chosen: [n, K + 1] int64, the token for each position in case it comes last
    """
    number = torch.arange(chosen.shape[1], device=chosen.device)
    padded = torch.nn.functional.pad(drafts, (0, 1))
    accepted = torch.where(number < num_accepted[:, None], padded, 0)
    return torch.where(number == num_accepted[:, None], chosen, accepted)


def drafts_of(slots: SlotTensors, step: StepTensors, count: int, width: int) -> Tensor:
    """[count, width] int64: the ids that follow the known tokens of the first `count` rows."""
    slot = step.row_slots[:count]
    number = torch.arange(width, device=slot.device)
    place = (slots.num_tokens[slot][:, None] + number).clamp(max=slots.token_ids.shape[1] - 1)
    return slots.token_ids[slot[:, None], place].long()


@op("chosen", kernel_module="verdict", native=True)
def write_verdict(
    chosen: Tensor,
    accepts: Tensor | None,
    slots: SlotTensors,
    step: StepTensors,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_drafts: Tensor,
) -> None:
    """Write what a step yields: accepted drafts, the token after them, and zeros to the end.

    chosen: [n, width] int64 for the first n rows, the token for each position in case it comes
    last, -1 if there is none; width is one more than the places for drafts, 1 to K + 1
    accepts: [n, width - 1] bool or int8; None accepts drafts that equal the token chosen there
    token_ids: [max_reqs, K + 1], num_tokens, num_drafts: [max_reqs], all int64 and written
    A row that accepts j drafts and has no token after them fails: its num_tokens is -1 - j.
    """
    count, width = chosen.shape
    drafts = drafts_of(slots, step, count, width - 1)
    if accepts is None:
        accepts = chosen[:, :-1] == drafts
    num_accepted = count_accepted(accepts, step.row_drafts[:count])
    token_ids.zero_()
    token_ids[:count, :width].copy_(join_tokens(drafts, num_accepted, chosen.clamp(min=0)))
    num_drafts.copy_(step.row_drafts)
    num_tokens.zero_()
    failed = chosen.gather(1, num_accepted[:, None]).squeeze(1) < 0
    counts = torch.where(failed, -1 - num_accepted, num_accepted + 1)
    num_tokens[:count].copy_(counts * step.samples[:count])


def accept_by_ratio(
    probs: Tensor, draft_probs: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """[n, K] bool: accept draft d with probability min(1, p(d) / q(d)).

    probs, draft_probs: [n, K, vocab_size]; seeds: [n]; positions: [n] of the first draft
    """
    p = probs.gather(2, drafts[:, :, None]).squeeze(2)
    q = draft_probs.gather(2, drafts[:, :, None]).squeeze(2)
    return _uniforms(seeds, positions, drafts.shape[1]).to(p.dtype) * q < p


@op("logits")
def judge_drafts(
    logits: Tensor,
    draft_logits: Tensor,
    drafts: Tensor,
    seeds: Tensor,
    positions: Tensor,
    slot: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return which drafts pass the ratio test, [n, K] bool, and what replaces those that do not,
    [n, K] int64.

    logits: [n, K + 1, vocab_size], adjusted; positions: [n] of the first draft
    draft_logits: [slots, K, vocab_size] and seeds: [slots], both read at `slot` [n]; without `slot`
    they have a row per row of the batch
    """
    if slot is not None:
        draft_logits, seeds = draft_logits[slot], seeds[slot]
    probs = logits[:, :-1].softmax(dim=2)
    draft_probs = draft_logits.to(probs.dtype).softmax(dim=2)
    accepts = accept_by_ratio(probs, draft_probs, drafts, seeds, positions)
    return accepts, draw_residual(probs, draft_probs, seeds, positions)


def accept_at_rate(rates: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[n, K] bool: accept draft j with probability rates[j], whatever it is; for benchmarks."""
    return _uniforms(seeds, positions, rates.shape[0]) < rates


def draw_residual(probs: Tensor, draft_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[n, K] int64: a token drawn from max(p - q, 0) at each draft, used where it is rejected.

    The noise comes from its own stream: the noise that chose a rejected draft is no longer random.
    """
    n, count, vocab_size = probs.shape
    residual = (probs - draft_probs).clamp(min=0)
    # Where p equals q to the last bit, only rounding can reject.
    empty = residual.sum(dim=2, keepdim=True) <= 0
    residual = torch.where(empty, probs, residual)
    place = (positions[:, None] + torch.arange(count, device=positions.device)).flatten()
    noise = gumbel(seeds.repeat_interleave(count), place, Purpose.RESAMPLE, vocab_size)
    return (residual.log() + noise.view(n, count, vocab_size)).argmax(dim=2)


def _uniforms(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """[n, count]: one number per position. A position is verified again only if nothing that its
    number decided was kept."""
    place = positions[:, None] + torch.arange(count, device=positions.device)
    flat = uniform(seeds.repeat_interleave(count), place.flatten(), Purpose.ACCEPT, 1)
    return flat.view(-1, count)
