"""The training-time test: in training, a head drafts as it will when serving.

Its first pass reads the target's features, like draft prefill. Each later pass reads its own output
of the pass before and the next true token, one position further, like a draft decode whose drafts
so far are right. All anchors of a pack run at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.models.base import DraftModel, Model
from stoop.ops.kernels.choice import without_kernels
from stoop.train.attention import PackedContext, UnrolledContext
from stoop.train.loss import soft_cross_entropy
from stoop.train.packing import Pack

LABEL_VALUES = 2**27  # target logits computed at a time


@dataclass(frozen=True)
class Lesson:
    """A pack, and what the frozen target computes from it."""

    pack: Pack
    streams: Tensor  # [tokens, taps, target_hidden_size]
    labels: Tensor  # [labels, drafts], the target's distribution over the draft vocabulary
    best: Tensor  # [labels] int64, the target's argmax
    known: Tensor  # [labels] bool: the argmax is in the draft vocabulary


@dataclass(frozen=True)
class Unrolled:
    """The results of a head's passes over a pack."""

    losses: list[Tensor]  # per pass, the mean over its anchors
    num_right: list[Tensor]  # per pass, anchors whose drafts are all right so far
    num_anchors: list[int]  # per pass
    accepted: Tensor  # [tokens] int64: consecutive right drafts from each anchor


@torch.no_grad()
def make_lesson(target: Model, head: DraftModel, pack: Pack, draft_ids: Tensor | None) -> Lesson:
    """Run the target. draft_ids: [drafts] int64, ids of the draft vocabulary; None: all tokens"""
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
    """Run the head's passes over a lesson."""
    pack = lesson.pack
    matrix = head.output_head.weight
    found = Unrolled([], [], [], torch.zeros_like(pack.positions))
    with without_kernels():
        context = UnrolledContext(pack.layout)
        features = head.condense(lesson.streams)
        for number, anchors in enumerate(pack.anchors):
            # Near a document's end this reads the next document, but no anchors are there.
            token_ids = pack.token_ids.roll(-1 - number)
            stream = head(token_ids, features, pack.positions + number, context)
            states, features = head.finish(stream)
            label = pack.label_of[anchors + 1 + number]
            # Labels outside the draft vocabulary do not count.
            weights = lesson.known[label].to(lesson.labels.dtype)
            weights = weights / weights.sum().clamp(min=1)
            loss, drafts = soft_cross_entropy(
                states.index_select(0, anchors), matrix, lesson.labels, label, weights
            )
            right = head.target_ids(drafts) == lesson.best[label]
            right &= found.accepted[anchors] == number
            found.accepted[anchors] += right
            found.losses.append(loss)
            found.num_right.append(right.sum())
            found.num_anchors.append(len(anchors))
    return found


def total_loss(losses: list[Tensor], decay: float) -> Tensor:
    """Sum the passes' losses; each further pass counts less by a factor of `decay`."""
    return torch.stack([decay**number * loss for number, loss in enumerate(losses)]).sum()
