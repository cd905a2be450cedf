"""Logits into tokens: masks, penalties, filters and the draw, all on the device.

Functions take logits of shape [n, vocab_size] in float32 or float64, one row for each position to
sample, and per-row parameters of shape [n]. Those named `*_` edit the logits in place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoop.ops.kernels.choice import uses_kernels
from stoop.ops.random import Purpose, gumbel


def kernels() -> Any:
    from stoop.ops.kernels import sampling

    return sampling


NEVER = float("-inf")


@dataclass(frozen=True)
class History:
    """What each row has seen: its tokens so far, prompt first."""

    token_ids: Tensor  # [n, length] int64; entries past num_tokens mean nothing
    num_tokens: Tensor  # [n] int64
    num_prompt_tokens: Tensor  # [n] int64

    @property
    def live(self) -> Tensor:
        return torch.arange(self.token_ids.shape[1], device=self.token_ids.device)[
            None, :
        ] < self.num_tokens.unsqueeze(1)

    @property
    def generated(self) -> Tensor:
        """[n, length] bool: known and not of the prompt."""
        place = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)[None, :]
        return self.live & (place >= self.num_prompt_tokens[:, None])


def add_bias_(logits: Tensor, token_ids: Tensor, bias: Tensor, counts: Tensor) -> None:
    """Add `bias` to the first `counts` of `token_ids`, both [n, width]."""
    live = _first(counts, token_ids.shape[1])
    logits.scatter_add_(1, torch.where(live, token_ids, 0), _as(logits, bias * live))


def forbid_(logits: Tensor, token_ids: Tensor, forbidden: Tensor) -> None:
    """Rule out the marked ones of `token_ids`; both [n, width], `forbidden` bool."""
    mask = torch.zeros_like(logits, dtype=torch.bool)
    # Unmarked entries land on token 0 and must not clear its mark: reduce, do not overwrite.
    mask = mask.to(torch.int8).scatter_reduce_(
        1, torch.where(forbidden, token_ids, 0), forbidden.to(torch.int8), "amax"
    )
    logits.masked_fill_(mask.bool(), NEVER)


def forbid_stops_(logits: Tensor, stop_ids: Tensor, counts: Tensor, too_early: Tensor) -> None:
    """No stop token before `min_tokens`. stop_ids: [n, width], too_early: [n] bool"""
    forbid_(logits, stop_ids, _first(counts, stop_ids.shape[1]) & too_early[:, None])


def forbid_bad_words_(logits: Tensor, words: Tensor, history: History) -> None:
    """Rule out the last token of a word whose other tokens were just generated.

    words: [n, num_words, length] int64, aligned right, padded with -1
    """
    num_before = words.shape[2] - 1
    offset = torch.arange(num_before, device=words.device) - num_before  # -num_before .. -1
    place = history.num_tokens[:, None] + offset  # [n, num_before]
    # A chunk's row knows more tokens than the batch's longest sequence has: it samples nothing.
    inside = place.clamp(min=0, max=history.token_ids.shape[1] - 1)
    tail = history.token_ids.gather(1, inside)
    tail = torch.where(place >= history.num_prompt_tokens[:, None], tail, -2)
    before, last = words[:, :, :-1], words[:, :, -1]
    matches = ((before == tail[:, None, :]) | (before == -1)).all(dim=2) & (last >= 0)
    forbid_(logits, last, matches)


def penalise_(
    logits: Tensor, history: History, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Repetition counts prompt and output, presence and frequency the output alone.

    repetition, presence, frequency: [n]
    """
    counts = torch.zeros_like(logits).scatter_add_(
        1, history.token_ids, _as(logits, history.generated)
    )
    seen = torch.zeros_like(logits).scatter_add_(1, history.token_ids, _as(logits, history.live))
    factor = torch.where(seen > 0, _as(logits, repetition)[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits -= _as(logits, frequency)[:, None] * counts
    logits -= _as(logits, presence)[:, None] * (counts > 0)


def apply_min_p_(logits: Tensor, min_p: Tensor) -> None:
    """Keep tokens at least `min_p` times as likely as the likeliest."""
    floor = logits.amax(dim=1, keepdim=True) + torch.log(_as(logits, min_p))[:, None]
    logits.masked_fill_(logits < floor, NEVER)


def apply_top_k_top_p_(logits: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> None:
    """Keep the `top_k` likeliest (0: all), and of them the fewest that reach `top_p` together.

    Of tokens that tie for the last place the first ones stay, whatever else is in the batch.
    width: no row keeps more than this many by `top_k`; it spares sorting the whole vocabulary.
    """
    width = min(width, logits.shape[1])
    best = logits.topk(width, dim=1).values  # in falling order
    rank = torch.arange(width, device=logits.device)[None, :]
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    probs = best.masked_fill(rank >= limit, NEVER).softmax(dim=1)
    before = probs.cumsum(dim=1) - probs  # mass of the likelier ones
    wanted = (before < _as(logits, top_p)[:, None]) | (top_p >= 1)[:, None] | (rank == 0)
    num_kept = (wanted & (rank < limit)).sum(dim=1, keepdim=True)  # a head of the falling order
    last = best.gather(1, num_kept - 1)
    num_above = (best > last).sum(dim=1, keepdim=True)
    ties = logits == last
    kept = (logits > last) | (ties & (ties.cumsum(dim=1) <= num_kept - num_above))
    unfiltered = ((top_k <= 0) & (top_p >= 1))[:, None]
    logits.masked_fill_(~(kept | unfiltered), NEVER)


@dataclass(frozen=True)
class DrawTensors:
    """What shapes a draw beside the logits, by slot."""

    temperature: Tensor  # [slots + 1] float32; 0: the likeliest
    seeds: Tensor  # [slots + 1] int64
    min_p: Tensor  # [slots + 1] float32
    top_k: Tensor  # [slots + 1] int64
    top_p: Tensor  # [slots + 1] float32


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    purpose: Purpose = Purpose.SAMPLE,
) -> Tensor:
    """[n] int64: a draw from softmax(logits), already tempered; the argmax at temperature 0."""
    if uses_kernels(logits):
        return kernels().draw(logits, temperature, seeds, positions, purpose)
    noise = gumbel(seeds, positions, purpose, logits.shape[1])
    noise.mul_((temperature > 0)[:, None])
    return (logits + noise).argmax(dim=1)


def greedy(logits: Tensor) -> Tensor:
    """[n] int64: the likeliest token; of equals the first."""
    return kernels().argmax(logits) if uses_kernels(logits) else logits.argmax(dim=1)


def temper_(logits: Tensor, temperature: Tensor) -> None:
    """Divide by the temperature; rows at 0 are greedy and stay."""
    logits /= torch.where(temperature > 0, _as(logits, temperature), 1.0)[:, None]


def score(logits: Tensor, chosen: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the chosen token and of the best ones.

    Returns ids [n, 1 + num_best], log-probabilities of the same shape, and ranks [n] of `chosen`.
    """
    if uses_kernels(logits):
        return kernels().score(logits, chosen, num_best)
    num_best = min(num_best, logits.shape[1])
    logprobs = logits.log_softmax(dim=1)
    own = logprobs.gather(1, chosen[:, None])
    rank = (logprobs > own).sum(dim=1) + 1
    best, best_ids = logprobs.topk(num_best, dim=1)
    return torch.cat((chosen[:, None], best_ids), 1), torch.cat((own, best), 1), rank


def _first(counts: Tensor, width: int) -> Tensor:
    """[n, width] bool: the first `counts` of each row."""
    return torch.arange(width, device=counts.device)[None, :] < counts[:, None]


def _as(logits: Tensor, values: Tensor) -> Tensor:
    return values.to(logits.dtype)
