"""Coupled drafts: drawn with the noise that will draw the target's tokens."""

from torch import Tensor

from stoop.ops.inputs import SlotTensors, StepTensors
from stoop.ops.kernels import sampling
from stoop.ops.kernels.sampling_filters import filter_
from stoop.ops.library import register
from stoop.ops.random import Purpose
from stoop.ops.sampling import DrawTensors


def draw_as_target(
    logits: Tensor,
    slots: SlotTensors,
    step: StepTensors,
    how: DrawTensors,
    d2t: Tensor | None,
    filters: bool,
) -> Tensor:
    """[n] int64: each row's next draft; the temperature is applied by the filters or the draw."""
    slot = step.row_slots[: logits.shape[0]]
    if filters:
        filter_(logits, how.temperature, how.min_p, how.top_k, how.top_p, slot)
    packed, out = sampling.draw_buffers(logits)
    draw_as_target_(
        logits, how.temperature, how.seeds, slots.num_tokens, slots.num_drafts, d2t, slot,
        not filters, packed, out,
    )  # fmt: skip
    return out


@register(
    "draw_as_target_(Tensor logits, Tensor temperature, Tensor seeds, Tensor num_tokens, "
    "Tensor num_drafts, Tensor? d2t, Tensor slot, bool tempers, Tensor(a!) packed, "
    "Tensor(b!) out) -> ()"
)
def draw_as_target_(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    num_tokens: Tensor,
    num_drafts: Tensor,
    d2t: Tensor | None,
    slot: Tensor,
    tempers: bool,
    packed: Tensor,
    out: Tensor,
) -> None:
    noise = (slot, temperature, seeds, num_tokens, num_drafts, d2t)
    sampling.reduce(logits, noise, packed, out, int(Purpose.SAMPLE), tempers)
