"""Bias, bans and penalties: edits of single logits, in place and in float32.

With `slot` ([n] int64), parameters are tables by slot, except `history.num_tokens`, and nothing is
gathered first. `history.max_seq_len` is not needed: a kernel reads no token past a row's length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.sampling import row_parameter
from stoop.ops.library import register
from stoop.ops.sampling import History

HISTORY_PART = 2048  # tokens of the history in a block
MASK_PART = 4096  # tokens of the vocabulary in a block


@triton.jit
def _apply_masks_kernel(
    logits_ptr,
    bits_ptr,
    rows_ptr,
    stride,
    bits_stride,
    size,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(rows_ptr + row)
    if own < 0:
        return
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    live = token < size
    word = tl.load(bits_ptr + own * bits_stride + token // 32, mask=live, other=0)
    forbidden = live & (((word >> (token % 32)) & 1) == 0)
    never = tl.full([PART], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * stride + token, never, mask=forbidden)


@register("apply_masks_(Tensor(a!) logits, Tensor bits, Tensor rows) -> ()")
def _apply_masks_(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    n, size = logits.shape
    _apply_masks_kernel[(n, triton.cdiv(size, MASK_PART))](
        logits, bits, rows, logits.stride(0), bits.stride(0), size, PART=MASK_PART, num_warps=4
    )


def apply_masks_(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """Rule out tokens whose bit is 0.

    bits: [m, ceil(vocab_size / 32)] int32; token t is bit t % 32 of word t // 32
    rows: [n] int64, the row of `bits` for each row of logits; -1 leaves the logits as they are
    """
    _check(logits)
    _apply_masks_(logits, bits, rows.contiguous())


@triton.jit
def _add_bias_kernel(
    logits_ptr,
    slot_ptr,
    ids_ptr,
    bias_ptr,
    counts_ptr,
    stride,
    ids_stride,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = row_parameter(row, slot_ptr)
    column = tl.arange(0, WIDTH)
    live = column < tl.load(counts_ptr + own)
    token = tl.load(ids_ptr + own * ids_stride + column, mask=live, other=0)
    bias = tl.load(bias_ptr + own * ids_stride + column, mask=live, other=0.0)
    tl.atomic_add(logits_ptr + row * stride + token, bias, mask=live, sem="relaxed")


@register(
    "add_bias_(Tensor(a!) logits, Tensor token_ids, Tensor bias, Tensor counts, Tensor? slot) -> ()"
)
def _add_bias_(
    logits: Tensor, token_ids: Tensor, bias: Tensor, counts: Tensor, slot: Tensor | None
) -> None:
    width = token_ids.shape[1]
    _add_bias_kernel[(logits.shape[0],)](
        logits, slot, token_ids, bias, counts, logits.stride(0), width,
        WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def add_bias_(
    logits: Tensor, token_ids: Tensor, bias: Tensor, counts: Tensor, slot: Tensor | None = None
) -> None:
    """Add `bias` to the logits of the first `counts` of `token_ids`, both [n, width]."""
    _check(logits)
    _add_bias_(logits, token_ids.contiguous(), bias.contiguous(), counts, slot)


@triton.jit
def _forbid_stops_kernel(
    logits_ptr,
    slot_ptr,
    ids_ptr,
    counts_ptr,
    min_tokens_ptr,
    num_tokens_ptr,
    num_prompt_ptr,
    stride,
    ids_stride,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = row_parameter(row, slot_ptr)
    num_output = tl.load(num_tokens_ptr + row) - tl.load(num_prompt_ptr + own)
    column = tl.arange(0, WIDTH)
    too_early = num_output < tl.load(min_tokens_ptr + own)
    live = (column < tl.load(counts_ptr + own)) & too_early
    token = tl.load(ids_ptr + own * ids_stride + column, mask=live, other=0)
    never = tl.full([WIDTH], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * stride + token, never, mask=live)


@register(
    "forbid_stops_(Tensor(a!) logits, Tensor stop_ids, Tensor counts, Tensor min_tokens, "
    "Tensor num_tokens, Tensor num_prompt_tokens, Tensor? slot) -> ()"
)
def _forbid_stops_(
    logits: Tensor,
    stop_ids: Tensor,
    counts: Tensor,
    min_tokens: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    slot: Tensor | None,
) -> None:
    width = stop_ids.shape[1]
    _forbid_stops_kernel[(logits.shape[0],)](
        logits, slot, stop_ids, counts, min_tokens, num_tokens, num_prompt_tokens,
        logits.stride(0), width, WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


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
    _check(logits)
    ids = stop_ids.contiguous()
    lengths = (history.num_tokens, history.num_prompt_tokens)
    _forbid_stops_(logits, ids, counts, min_tokens, *lengths, slot)


@triton.jit(do_not_specialize=["tokens_width"])
def _forbid_bad_words_kernel(
    logits_ptr,
    slot_ptr,
    words_ptr,
    counts_ptr,
    tokens_ptr,
    num_tokens_ptr,
    num_prompt_ptr,
    stride,
    tokens_stride,
    tokens_width,
    num_words,
    LENGTH: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Words are loaded whole; the comparison skips their last column."""
    row = tl.program_id(0).to(tl.int64)
    own = row_parameter(row, slot_ptr)
    word, column = tl.arange(0, WORDS), tl.arange(0, WIDTH)
    live = word < tl.load(counts_ptr + own)
    words_ptr += own * num_words * LENGTH
    last = tl.load(words_ptr + word * LENGTH + LENGTH - 1, mask=live, other=-1)
    before = tl.load(
        words_ptr + word[:, None] * LENGTH + column[None, :],
        mask=live[:, None] & (column < LENGTH - 1)[None, :],
        other=-1,
    )
    place = tl.load(num_tokens_ptr + row) + column - (LENGTH - 1)
    place_in = tl.minimum(tl.maximum(place, 0), tokens_width - 1)
    tail = tl.load(tokens_ptr + own * tokens_stride + place_in).to(tl.int64)
    tail = tl.where(place >= tl.load(num_prompt_ptr + own), tail, -2)
    differs = (before != tail[None, :]) & (before != -1)
    matches = (tl.sum(differs.to(tl.int32), axis=1) == 0) & (last >= 0)
    never = tl.full([WORDS], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * stride + last, never, mask=matches)


@register(
    "forbid_bad_words_(Tensor(a!) logits, Tensor words, Tensor counts, Tensor token_ids, "
    "Tensor num_tokens, Tensor num_prompt_tokens, Tensor? slot) -> ()"
)
def _forbid_bad_words_(
    logits: Tensor,
    words: Tensor,
    counts: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    slot: Tensor | None,
) -> None:
    _, num_words, length = words.shape
    _forbid_bad_words_kernel[(logits.shape[0],)](
        logits, slot, words, counts, token_ids, num_tokens, num_prompt_tokens,
        logits.stride(0), token_ids.stride(0), token_ids.shape[1], num_words, LENGTH=length,
        WORDS=triton.next_power_of_2(num_words), WIDTH=triton.next_power_of_2(length),
        num_warps=4,
    )  # fmt: skip


def forbid_bad_words_(
    logits: Tensor, words: Tensor, counts: Tensor, history: History, slot: Tensor | None = None
) -> None:
    """Forbid the last token of a word whose other tokens were just generated.

    words: [n, num_words, length] int64, aligned right, padded with -1; the first `counts` [n] of a
    row are valid
    """
    _check(logits)
    lengths = (history.num_tokens, history.num_prompt_tokens)
    _forbid_bad_words_(logits, words.contiguous(), counts, history.token_ids, *lengths, slot)


@triton.jit
def _history_part(tokens_ptr, start, num_tokens, size, PART: tl.constexpr):
    """Return places, tokens, and which of them are valid."""
    place = start + tl.arange(0, PART)
    token = tl.load(tokens_ptr + place, mask=place < num_tokens, other=-1)
    return place, token, (token >= 0) & (token < size)


@triton.jit(do_not_specialize=["tokens_width"])
def _penalise_kernel(
    logits_ptr,
    slot_ptr,
    tokens_ptr,
    num_tokens_ptr,
    num_prompt_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    stride,
    tokens_stride,
    tokens_width,
    size,
    PART: tl.constexpr,
):
    """Walk a row's history three times: clear the counts of its tokens, count, then edit each token
    once: the lane that takes its count first edits it. Other counts are never read."""
    row = tl.program_id(0).to(tl.int64)
    own = row_parameter(row, slot_ptr)
    repetition = tl.load(repetition_ptr + own)
    presence = tl.load(presence_ptr + own)
    frequency = tl.load(frequency_ptr + own)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    num_tokens = tl.minimum(tl.load(num_tokens_ptr + row), tokens_width).to(tl.int32)
    num_prompt = tl.load(num_prompt_ptr + own)
    logits_ptr += row * stride
    tokens_ptr += own * tokens_stride
    counts_ptr += row * size
    for start in range(0, num_tokens, PART):
        place, token, live = _history_part(tokens_ptr, start, num_tokens, size, PART)
        tl.atomic_xchg(counts_ptr + token, place * 0, mask=live, sem="relaxed")
    tl.debug_barrier()
    for start in range(0, num_tokens, PART):
        place, token, live = _history_part(tokens_ptr, start, num_tokens, size, PART)
        generated = live & (place >= num_prompt)
        tl.atomic_add(counts_ptr + token, place * 0 + 1, mask=generated, sem="relaxed")
    tl.debug_barrier()
    for start in range(0, num_tokens, PART):
        place, token, live = _history_part(tokens_ptr, start, num_tokens, size, PART)
        count = tl.atomic_xchg(counts_ptr + token, place * 0 - 1, mask=live, sem="relaxed")
        first = live & (count >= 0)
        x = tl.load(logits_ptr + token, mask=first, other=0.0)
        x = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
        x -= frequency * count.to(tl.float32)
        x -= tl.where(count > 0, presence, 0.0)
        tl.store(logits_ptr + token, x, mask=first)


@register(
    "penalise_(Tensor(a!) logits, Tensor token_ids, Tensor num_tokens, Tensor num_prompt_tokens, "
    "Tensor repetition, Tensor presence, Tensor frequency, Tensor? slot, Tensor(b!) counts) -> ()"
)
def _penalise_(
    logits: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    slot: Tensor | None,
    counts: Tensor,
) -> None:
    """counts: [n, vocab_size] int32, uninitialised scratch"""
    n, vocab_size = counts.shape
    _penalise_kernel[(n,)](
        logits, slot, token_ids, num_tokens, num_prompt_tokens, repetition, presence, frequency,
        counts, logits.stride(0), token_ids.stride(0), token_ids.shape[1], vocab_size,
        PART=HISTORY_PART, num_warps=16,
    )  # fmt: skip


def penalise_(
    logits: Tensor,
    history: History,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    slot: Tensor | None = None,
) -> None:
    """Penalise tokens of the history: repetition counts prompt and output, the others the output.

    repetition, presence, frequency: [n]; history.token_ids may be int32
    """
    _check(logits)
    counts = torch.empty(logits.shape, dtype=torch.int32, device=logits.device)
    lengths = (history.num_tokens, history.num_prompt_tokens)
    factors = (repetition, presence, frequency)
    _penalise_(logits, history.token_ids, *lengths, *factors, slot, counts)


def _check(logits: Tensor) -> None:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
