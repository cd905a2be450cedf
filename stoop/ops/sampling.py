"""Logits to tokens: edits, filters and the draw, all on the device.

Logits have shape [n, vocab_size] in float32 or float64, one row per position to sample. Functions
named `*_` edit them in place. With `slot` ([n] int64), parameters are tables by slot, [slots, ...],
and row i uses their entry `slot[i]`; without `slot` they have one entry per row, [n, ...].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.ops.dispatch import op
from stoop.ops.random import Purpose, gumbel

NEVER = float("-inf")


@dataclass(frozen=True)
class History:
    """The tokens that precede each row, prompt first."""

    token_ids: Tensor  # [n, length] or [slots, length]; entries past num_tokens mean nothing
    num_tokens: Tensor  # [n] int64, always by row
    num_prompt_tokens: Tensor  # [n] or [slots] int64
    max_seq_len: int | None = None  # bound of num_tokens: what the reference reads of a table

    def by_row(self, slot: Tensor | None) -> "History":
        """Gather the tables, up to max_seq_len tokens. Only the reference needs this copy."""
        if slot is None:
            return self
        token_ids = self.token_ids[slot, : self.max_seq_len].long()
        return History(token_ids, self.num_tokens, self.num_prompt_tokens[slot])

    @property
    def live(self) -> Tensor:
        """[n, length] bool: whether there is a token. Needs a history by row."""
        return self._place < self.num_tokens[:, None]

    @property
    def generated(self) -> Tensor:
        """[n, length] bool: whether there is a token after the prompt. Needs a history by row."""
        return self.live & (self._place >= self.num_prompt_tokens[:, None])

    @property
    def _place(self) -> Tensor:
        return torch.arange(self.token_ids.shape[1], device=self.token_ids.device)[None, :]


@dataclass(frozen=True)
class MaskTensors:
    """The tokens that grammars allow, in bits. The host writes them before phase V."""

    bits: Tensor  # [max_reqs * (K + 1), ceil(vocab_size / 32)] int32: 1 for tokens that are allowed
    rows: Tensor  # [max_reqs, K + 1] int64: row of `bits` for each position; -1 for no mask

    @staticmethod
    def make(max_reqs: int, width: int, vocab_size: int, device: torch.device) -> "MaskTensors":
        shape = (max_reqs * width, -(-vocab_size // 32))
        return MaskTensors(
            bits=torch.zeros(shape, dtype=torch.int32, device=device),
            rows=torch.full((max_reqs, width), -1, dtype=torch.int64, device=device),
        )


# ---- edits ----


@op("logits", kernel_module="sampling_edits")
def apply_masks_(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """Rule out tokens whose bit is 0.

    bits: [m, ceil(vocab_size / 32)] int32; token t is bit t % 32 of word t // 32
    rows: [n] int64, the row of `bits` for each row of logits; -1 leaves the logits as they are
    """
    words = bits[rows.clamp(min=0)]  # [n, words]
    place = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (words[:, :, None] >> place) & 1
    forbidden = (allowed == 0).flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(forbidden & (rows >= 0)[:, None], NEVER)


@op("logits", kernel_module="sampling_edits")
def add_bias_(
    logits: Tensor, token_ids: Tensor, bias: Tensor, counts: Tensor, slot: Tensor | None = None
) -> None:
    """Add `bias` to the logits of the first `counts` of `token_ids`, both [n, width]."""
    token_ids, bias, counts = _rows(slot, token_ids, bias, counts)
    live = _first(counts, token_ids.shape[1])
    logits.scatter_add_(1, torch.where(live, token_ids, 0), _as(logits, bias * live))


@op("logits", kernel_module="sampling_edits")
def forbid_stops_(
    logits: Tensor,
    stop_ids: Tensor,
    counts: Tensor,
    min_tokens: Tensor,
    history: History,
    slot: Tensor | None = None,
) -> None:
    """Forbid stop tokens until `min_tokens` [n] tokens are generated.

    stop_ids: [n, width], of which the first `counts` [n] are valid
    """
    stop_ids, counts, min_tokens, num_prompt_tokens = _rows(
        slot, stop_ids, counts, min_tokens, history.num_prompt_tokens
    )
    too_early = history.num_tokens - num_prompt_tokens < min_tokens
    _forbid_(logits, stop_ids, _first(counts, stop_ids.shape[1]) & too_early[:, None])


@op("logits", kernel_module="sampling_edits")
def forbid_bad_words_(
    logits: Tensor, words: Tensor, counts: Tensor, history: History, slot: Tensor | None = None
) -> None:
    """Forbid the last token of a word whose other tokens were just generated.

    words: [n, num_words, length] int64, aligned right, padded with -1; the first `counts` [n] of a
    row are valid
    """
    words, counts, num_prompt_tokens = _rows(slot, words, counts, history.num_prompt_tokens)
    num_before = words.shape[2] - 1
    offset = torch.arange(num_before, device=words.device) - num_before  # -num_before .. -1
    place = history.num_tokens[:, None] + offset  # [n, num_before]
    row = torch.arange(logits.shape[0], device=words.device) if slot is None else slot
    # A chunk's row may know more tokens than there is room for: it samples nothing.
    inside = place.clamp(min=0, max=history.token_ids.shape[1] - 1)
    tail = history.token_ids[row[:, None], inside]
    tail = torch.where(place >= num_prompt_tokens[:, None], tail, -2)
    before, last = words[:, :, :-1], words[:, :, -1]
    matches = ((before == tail[:, None, :]) | (before == -1)).all(dim=2)
    matches &= _first(counts, words.shape[1]) & (last >= 0)
    _forbid_(logits, last, matches)


@op("logits", kernel_module="sampling_edits")
def penalise_(
    logits: Tensor,
    history: History,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    slot: Tensor | None = None,
) -> None:
    """Penalise tokens of the history: repetition counts prompt and output, the others the output.

    repetition, presence, frequency: [n]
    """
    repetition, presence, frequency = _rows(slot, repetition, presence, frequency)
    history = history.by_row(slot)
    counts = torch.zeros_like(logits).scatter_add_(
        1, history.token_ids, _as(logits, history.generated)
    )
    seen = torch.zeros_like(logits).scatter_add_(1, history.token_ids, _as(logits, history.live))
    factor = torch.where(seen > 0, _as(logits, repetition)[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits -= _as(logits, frequency)[:, None] * counts
    logits -= _as(logits, presence)[:, None] * (counts > 0)


def _forbid_(logits: Tensor, token_ids: Tensor, forbidden: Tensor) -> None:
    """Rule out those of `token_ids` that are marked; both [n, width], `forbidden` bool."""
    mask = torch.zeros_like(logits, dtype=torch.bool)
    # Unmarked entries land on token 0 and must not clear its mark: reduce, do not overwrite.
    mask = mask.to(torch.int8).scatter_reduce_(
        1, torch.where(forbidden, token_ids, 0), forbidden.to(torch.int8), "amax"
    )
    logits.masked_fill_(mask.bool(), NEVER)


# ---- filters ----


@op("logits", kernel_module="sampling_filters")
def filter_(
    logits: Tensor,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    slot: Tensor | None = None,
    top_k_width: int = 0,
) -> None:
    """Apply the temperature, then min-p, then top-k and top-p together; None skips a step.

    All [n]. Temperature 0 changes nothing, nor does min_p 0, nor top_k 0 with top_p 1.
    top_k_width: the largest top_k, if every row that counts has one, else 0; it lets the reference
    sort only a part of the vocabulary
    """
    if temperature is not None:
        temper_(logits, *_rows(slot, temperature))
    if min_p is not None:
        apply_min_p_(logits, *_rows(slot, min_p))
    if top_k is not None and top_p is not None:
        top_k, top_p = _rows(slot, top_k, top_p)
        apply_top_k_top_p_(logits, top_k, top_p, top_k_width or logits.shape[1])


def temper_(logits: Tensor, temperature: Tensor) -> None:
    """Divide by the temperature [n]; rows at 0 are greedy and stay as they are."""
    logits /= torch.where(temperature > 0, _as(logits, temperature), 1.0)[:, None]


def apply_min_p_(logits: Tensor, min_p: Tensor) -> None:
    """Keep tokens that are at least `min_p` [n] times as likely as the likeliest."""
    floor = logits.amax(dim=1, keepdim=True) + torch.log(_as(logits, min_p))[:, None]
    logits.masked_fill_(logits < floor, NEVER)


def apply_top_k_top_p_(logits: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> None:
    """Keep the `top_k` [n] likeliest (0: all), and of them the fewest that reach `top_p` together.

    Of tokens that tie for the last place the first ones stay, whatever else is in the batch.
    width: no row keeps more than this many by `top_k`, so only as many are sorted
    """
    width = min(width, logits.shape[1])
    best = logits.topk(width, dim=1).values  # in descending order
    rank = torch.arange(width, device=logits.device)[None, :]
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    probs = best.masked_fill(rank >= limit, NEVER).softmax(dim=1)
    before = probs.cumsum(dim=1) - probs  # mass of the likelier ones
    wanted = (before < _as(logits, top_p)[:, None]) | (top_p >= 1)[:, None] | (rank == 0)
    num_kept = (wanted & (rank < limit)).sum(dim=1, keepdim=True)  # a prefix of the sorted tokens
    last = best.gather(1, num_kept - 1)
    num_above = (best > last).sum(dim=1, keepdim=True)
    ties = logits == last
    kept = (logits > last) | (ties & (ties.cumsum(dim=1) <= num_kept - num_above))
    unfiltered = ((top_k <= 0) & (top_p >= 1))[:, None]
    logits.masked_fill_(~(kept | unfiltered), NEVER)


# ---- the draw ----


@dataclass(frozen=True)
class DrawTensors:
    """Parameters of a draw, by slot."""

    temperature: Tensor  # [slots + 1] float32; 0: the likeliest token
    seeds: Tensor  # [slots + 1] int64
    min_p: Tensor  # [slots + 1] float32
    top_k: Tensor  # [slots + 1] int64
    top_p: Tensor  # [slots + 1] float32


@op("logits")
def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    purpose: Purpose = Purpose.SAMPLE,
    slot: Tensor | None = None,
    tempers: bool = False,
    checks: bool = False,
) -> Tensor:
    """[n] int64: a draw from softmax(logits); the argmax at temperature 0.

    temperature, seeds: [n]; positions: [n], always by row
    tempers: divide by the temperature here; otherwise the logits are tempered already
    checks: -1 for a row without a best token, as in `greedy`
    """
    temperature, seeds = _rows(slot, temperature, seeds)
    if tempers:
        logits = logits.clone()
        temper_(logits, temperature)
    noise = gumbel(seeds, positions, purpose, logits.shape[1])
    noise.mul_((temperature > 0)[:, None])
    return greedy.reference(logits + noise, checks)


@op("logits", native=True)
def greedy(logits: Tensor, checks: bool = False) -> Tensor:
    """[n] int64: the likeliest token, the first of equal ones.

    checks: -1 for a row without a best token: one has NaN, or all are -inf
    """
    best = logits.argmax(dim=1)
    if not checks:
        return best
    return torch.where(logits.gather(1, best[:, None]).squeeze(1) > NEVER, best, -1)


@op("logits")
def score(logits: Tensor, chosen: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities of the chosen token and of the best ones.

    Returns ids [n, 1 + num_best], log-probabilities of the same shape, and ranks [n] of `chosen`.
    """
    num_best = min(num_best, logits.shape[1])
    logprobs = logits.log_softmax(dim=1)
    own = logprobs.gather(1, chosen[:, None])
    rank = (logprobs > own).sum(dim=1) + 1
    best, best_ids = logprobs.topk(num_best, dim=1)
    return torch.cat((chosen[:, None], best_ids), 1), torch.cat((own, best), 1), rank


def _rows(slot: Tensor | None, *tables: Tensor) -> tuple[Tensor, ...]:
    """Each table's entries of the rows; without `slot` the tables are by row already."""
    return tables if slot is None else tuple(table[slot] for table in tables)


def _first(counts: Tensor, width: int) -> Tensor:
    """[n, width] bool: the first `counts` of each row."""
    return torch.arange(width, device=counts.device)[None, :] < counts[:, None]


def _as(logits: Tensor, values: Tensor) -> Tensor:
    return values.to(logits.dtype)
