"""The training-time test: a head drafts in training as it will when serving.

Its first pass reads the target's features, as draft prefill does; each later one its own output of
the pass before and the token that truly came, one place further on, as a draft decode does whose
drafts were right. All slots of a pack do this at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.models.base import DraftModel, Model
from stoop.ops.kernels.choice import without_kernels
from stoop.train.attention import PackedContext, UnrolledContext
from stoop.train.loss import soft_cross_entropy
from stoop.train.packing import Pack

LABEL_VALUES = 2**27  # of the target's logits at a time


@dataclass(frozen=True)
class Lesson:
    """A pack, and what the frozen target makes of it."""

    pack: Pack
    streams: Tensor  # [tokens, taps, target_hidden_size]
    labels: Tensor  # [labels, drafts], the target's distribution over what may be drafted
    best: Tensor  # [labels] int64, the target's own choice
    known: Tensor  # [labels] bool: it may be drafted


@dataclass(frozen=True)
class Unrolled:
    losses: list[Tensor]  # one a pass, the mean over its slots
    num_right: list[Tensor]  # of each pass, slots whose drafts were all right so far
    num_slots: list[int]
    accepted: Tensor  # [tokens] int64: how many drafts of each slot were right in a row


@torch.no_grad()
def make_lesson(target: Model, head: DraftModel, pack: Pack, draft_ids: Tensor | None) -> Lesson:
    """draft_ids: [drafts] int64, the target's ids of what may be drafted; None: everything"""
    hidden, streams = target(
        pack.token_ids, pack.positions, PackedContext(pack.layout), head.spec.taps
    )
    states = hidden[pack.label_places]
    labels, best = [], []
    for part in states.split(max(1, LABEL_VALUES // target.spec.vocab_size)):
        logits = target.logits(part)
        best.append(logits.argmax(-1))
        drafted = logits if draft_ids is None else logits[:, draft_ids]
        labels.append(drafted.softmax(-1))
    chosen = torch.cat(best)
    known = torch.ones_like(chosen, dtype=torch.bool)
    if draft_ids is not None:
        known = torch.isin(chosen, draft_ids)
    return Lesson(pack, torch.stack(streams, dim=1), torch.cat(labels), chosen, known)


def unroll(head: DraftModel, lesson: Lesson) -> Unrolled:
    """As many passes as the pack has slots for."""
    pack = lesson.pack
    matrix = head.output_head.weight
    found = Unrolled([], [], [], torch.zeros_like(pack.positions))
    with without_kernels():
        context = UnrolledContext(pack.layout)
        features = head.condense(lesson.streams)
        for number, slots in enumerate(pack.slots):
            # Behind the end of a document stands the next one's start: no slot there learns.
            token_ids = pack.token_ids.roll(-1 - number)
            stream = head(token_ids, features, pack.positions + number, context)
            states, features = head.finish(stream)
            label = pack.label_of[slots + 1 + number]
            # A draft that the head cannot name teaches it nothing.
            weights = lesson.known[label].to(lesson.labels.dtype)
            weights = weights / weights.sum().clamp(min=1)
            loss, drafts = soft_cross_entropy(
                states.index_select(0, slots), matrix, lesson.labels, label, weights
            )
            right = head.target_ids(drafts) == lesson.best[label]
            right &= found.accepted[slots] == number
            found.accepted[slots] += right
            found.losses.append(loss)
            found.num_right.append(right.sum())
            found.num_slots.append(len(slots))
    return found


def total_loss(losses: list[Tensor], decay: float) -> Tensor:
    """Later passes count less."""
    return torch.stack([decay**number * loss for number, loss in enumerate(losses)]).sum()
