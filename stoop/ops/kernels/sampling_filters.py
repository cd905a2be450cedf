"""Temperature, min-p, top-k and top-p, in place and in float32.

A row's limit is the value of the last token that is kept and the place up to which tokens of equal
value are kept. It is found by narrowing an interval of values: each pass counts and weighs (sums
the probability mass of) the tokens at or above three thresholds inside it. The first passes cut the
interval evenly by value, which soon leaves few tokens. The next ones cut it evenly by number of
floats, which ends after 16 more passes for any row.

To keep passes short, the programs of all parts of the row first count and weigh it at a few levels
below the likeliest token. They then copy out the tokens at or above the lowest level at which the
limit can be. If those do not fit the scratch space, passes go over the whole row.

With `slot` ([n] int64), parameters are tables by slot.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoop.ops.kernels.sampling import (
    PART,
    float_key,
    load_part,
    num_parts,
    row_parameter,
    width,
)
from stoop.ops.library import register

SEARCH_PART = 4096  # tokens in a block of the search
SEARCH_WARPS = 16
EVEN_PASSES = tl.constexpr(6)  # passes that cut evenly by value
REACH = tl.constexpr(32.0)  # the first cuts lie within this distance of the likeliest
LEVELS = tl.constexpr(16)  # one unit apart, the last at the floor
CHUNK = tl.constexpr(512)  # tokens weighed at all levels in one block
ROOM = tl.constexpr(128)  # tokens that a part can copy out
SLACK = tl.constexpr(1.0001)  # sums in another order must still reach top_p


@triton.jit
def _temper_kernel(
    logits_ptr,
    slot_ptr,
    temperature_ptr,
    best_ptr,
    stride,
    size,
    num_parts,
    PART: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * stride
    column, x = load_part(logits_ptr, part * PART, size, PART, float("-inf"))
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row_parameter(row, slot_ptr))
        if (temperature > 0) & (temperature != 1.0):
            x = tl.div_rn(x, temperature + tl.zeros_like(x))
            tl.store(logits_ptr + column, x, mask=column < size)
    if best_ptr is not None:
        tl.store(best_ptr + row * num_parts + part, tl.max(x, axis=0))


@triton.jit
def _row_values(
    best_ptr, slot_ptr, min_p_ptr, top_k_ptr, top_p_ptr, num_parts, WIDTH: tl.constexpr
):
    """Return the largest value, min-p's floor, top_k, top_p, and whether these two filter."""
    row = tl.program_id(0).to(tl.int64)
    own = row_parameter(row, slot_ptr)
    part = tl.arange(0, WIDTH)
    bests = tl.load(best_ptr + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    best = tl.max(bests, axis=0)
    # A row of -inf, or with a value that is not finite, is no distribution.
    finite = tl.abs(best) < float("inf")
    floor = tl.full([], float("-inf"), tl.float32)
    if min_p_ptr is not None:
        floor = tl.where(finite, best + tl.log(tl.load(min_p_ptr + own)), floor)
    top_k, top_p = tl.full([], 0, tl.int64), tl.full([], 1.0, tl.float32)
    if top_k_ptr is not None:
        top_k, top_p = tl.load(top_k_ptr + own), tl.load(top_p_ptr + own)
    return best, floor, top_k, top_p, ((top_k > 0) | (top_p < 1)) & finite


@triton.jit
def _level_value(best, floor, level):
    value = tl.maximum(best - (level + 1).to(tl.float32), floor)
    return tl.where(level == LEVELS - 1, floor, value)


@triton.jit
def _sketch_kernel(
    logits_ptr,
    slot_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    numbers_ptr,
    masses_ptr,
    stride,
    size,
    num_parts,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    """Number and mass of a part's tokens at or above each level."""
    best, floor, _, _, cuts = _row_values(
        best_ptr, slot_ptr, min_p_ptr, top_k_ptr, top_p_ptr, num_parts, WIDTH
    )
    if not cuts:
        return
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    level = tl.arange(0, LEVELS)
    value = _level_value(best, floor, level)
    number = tl.zeros([CHUNK, LEVELS], tl.int32)
    mass = tl.zeros([CHUNK, LEVELS], tl.float32)
    for start in range(part * PART, part * PART + PART, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride + column, mask=column < size, other=float("nan"))
        inside = x[:, None] >= value[None, :]
        number += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(x - best)[:, None], 0.0)
    out = (row * num_parts + part) * LEVELS + level
    tl.store(numbers_ptr + out, tl.sum(number, axis=0))
    tl.store(masses_ptr + out, tl.sum(mass, axis=0))


@triton.jit
def _start(numbers_ptr, masses_ptr, top_k, top_p, num_parts, WIDTH: tl.constexpr):
    """Return the lowest level of the limit, number and mass there, and those at the floor."""
    row = tl.program_id(0).to(tl.int64)
    part, level = tl.arange(0, WIDTH), tl.arange(0, LEVELS)
    place = (row * num_parts + part[:, None]) * LEVELS + level[None, :]
    live = (part < num_parts)[:, None]
    numbers = tl.sum(tl.load(numbers_ptr + place, mask=live, other=0), axis=0)
    masses = tl.sum(tl.load(masses_ptr + place, mask=live, other=0.0), axis=0)
    number = tl.sum(tl.where(level == LEVELS - 1, numbers, 0), axis=0)
    mass = tl.sum(tl.where(level == LEVELS - 1, masses, 0.0), axis=0)
    heavy = (masses >= top_p * mass * SLACK).to(tl.int32)
    enough = tl.where((top_k > 0) & (top_k < number), (numbers >= top_k).to(tl.int32), heavy)
    at = tl.min(tl.where((enough > 0) | (level == LEVELS - 1), level, LEVELS), axis=0)
    n_low = tl.sum(tl.where(level == at, numbers, 0), axis=0)
    m_low = tl.sum(tl.where(level == at, masses, 0.0), axis=0)
    return at, n_low, m_low, number, mass


@triton.jit
def _copy_kernel(
    logits_ptr,
    slot_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    numbers_ptr,
    masses_ptr,
    copied_ptr,
    fits_ptr,
    stride,
    size,
    num_parts,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    """Copy out the tokens of a part that the search needs; NaN, which is in no set, fills up."""
    best, floor, top_k, top_p, cuts = _row_values(
        best_ptr, slot_ptr, min_p_ptr, top_k_ptr, top_p_ptr, num_parts, WIDTH
    )
    if not cuts:
        return
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, _, _, _, _ = _start(numbers_ptr, masses_ptr, top_k, top_p, num_parts, WIDTH)
    _, x = load_part(logits_ptr + row * stride, part * PART, size, PART, float("nan"))
    inside = x >= _level_value(best, floor, at)
    place = tl.cumsum(inside.to(tl.int32), axis=0) - 1
    number = tl.sum(inside.to(tl.int32), axis=0)
    out = row * num_parts + part
    tl.store(copied_ptr + out * ROOM + place, x, mask=inside & (place < ROOM))
    room = tl.arange(0, ROOM)
    blank = tl.full([ROOM], float("nan"), tl.float32)
    tl.store(copied_ptr + out * ROOM + room, blank, mask=room >= number)
    tl.store(fits_ptr + out, (number <= ROOM).to(tl.int32))


@triton.jit
def _value(key):
    """The float of an order-preserving key, an int64 scalar."""
    short = key.to(tl.int32)
    return (short ^ ((short >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key(value):
    return float_key(value).to(tl.int64)


@triton.jit
def _tally(logits_ptr, size, best, t1, t2, t3, PART: tl.constexpr):
    """Count and weigh the values at or above each threshold; the likeliest has mass 1."""
    n1, n2, n3 = (tl.zeros([PART], tl.int32),) * 3
    m1, m2, m3 = (tl.zeros([PART], tl.float32),) * 3
    for start in range(0, size, PART):
        _, x = load_part(logits_ptr, start, size, PART, float("nan"))  # NaN is in no set
        mass = tl.exp(x - best)
        n1 += (x >= t1).to(tl.int32)
        n2 += (x >= t2).to(tl.int32)
        n3 += (x >= t3).to(tl.int32)
        m1 += tl.where(x >= t1, mass, 0.0)
        m2 += tl.where(x >= t2, mass, 0.0)
        m3 += tl.where(x >= t3, mass, 0.0)
    return (
        tl.sum(n1, axis=0), tl.sum(n2, axis=0), tl.sum(n3, axis=0),
        tl.sum(m1, axis=0), tl.sum(m2, axis=0), tl.sum(m3, axis=0),
    )  # fmt: skip


@triton.jit
def _cuts(low, high, step):
    """Three keys in ascending order inside (low, high), which has at least one."""
    span = high - low
    k1 = low + tl.maximum(span // 4, 1)
    k2 = low + span // 2
    k3 = low + tl.maximum(3 * span // 4, 1)
    if step < EVEN_PASSES:
        top = _value(high)
        reach = tl.minimum(top - _value(low), REACH)
        k1 = tl.minimum(tl.maximum(_key(top - 0.75 * reach), low + 1), high - 1)
        k2 = tl.minimum(tl.maximum(_key(top - 0.5 * reach), low + 1), high - 1)
        k3 = tl.minimum(tl.maximum(_key(top - 0.25 * reach), low + 1), high - 1)
    return k1, k2, k3


@triton.jit
def _narrow(logits_ptr, size, best, goal, low, n_low, m_low, BY_MASS: tl.constexpr, PART):
    """Narrow [low, high) to the values among which the goal is reached from above.

    goal: a mass or a number. Tokens at or above `low` reach it, those at or above `high` do not.
    n_low, m_low: number and mass of the tokens at or above `low`
    """
    high = _key(best) + 1
    n_high, m_high = n_low * 0, m_low * 0.0
    step = 0
    busy = high - low > 1
    while busy:
        k1, k2, k3 = _cuts(low, high, step)
        n1, n2, n3, m1, m2, m3 = _tally(
            logits_ptr, size, best, _value(k1), _value(k2), _value(k3), PART
        )
        r1, r2, r3 = n1 >= goal, n2 >= goal, n3 >= goal
        if BY_MASS:
            r1, r2, r3 = m1 >= goal, m2 >= goal, m3 >= goal
        high = tl.where(r3, high, tl.where(r2, k3, tl.where(r1, k2, k1)))
        n_high = tl.where(r3, n_high, tl.where(r2, n3, tl.where(r1, n2, n1)))
        m_high = tl.where(r3, m_high, tl.where(r2, m3, tl.where(r1, m2, m1)))
        low = tl.where(r3, k3, tl.where(r2, k2, tl.where(r1, k1, low)))
        n_low = tl.where(r3, n3, tl.where(r2, n2, tl.where(r1, n1, n_low)))
        m_low = tl.where(r3, m3, tl.where(r2, m2, tl.where(r1, m1, m_low)))
        step += 1
        busy = (high - low > 1) & (n_low - n_high > 1)
        if not BY_MASS:
            busy = busy & (n_low != goal)
    return low, n_low, m_low, n_high, m_high


@triton.jit
def _top_k(x_ptr, size, best, top_k, low, number, mass, PART: tl.constexpr):
    """Return key, number and mass of what is kept, and how many equals of the last (-1: all)."""
    goal = top_k.to(tl.int32)
    low, number, mass, n_above, m_above = _narrow(
        x_ptr, size, best, goal, low, number, mass, False, PART
    )
    ties = goal * 0 - 1
    if number > goal:
        ties = goal - n_above
        number = goal
        mass = m_above + ties.to(tl.float32) * tl.exp(_value(low) - best)
    return low, number, mass, ties


@triton.jit
def _top_p(x_ptr, size, best, goal, low, number, mass, ties, PART: tl.constexpr):
    """Return the key of the last kept value, and how many of its equals (-1: all). goal: a mass"""
    start = low
    low, number, mass, n_above, m_above = _narrow(
        x_ptr, size, best, goal, low, number, mass, True, PART
    )
    group = number - n_above
    own = tl.exp(_value(low) - best)
    needed = tl.minimum(tl.ceil((goal - m_above) / own), group.to(tl.float32)).to(tl.int32)
    needed = tl.where(group > 1, tl.maximum(needed, 1), group)
    every = tl.where(low == start, ties, -1)
    return low, tl.where(needed >= group, every, needed)


@triton.jit
def _tie_end(logits_ptr, size, last, ties, PART: tl.constexpr):
    """The place after the tie with number `ties`."""
    end, seen = size + ties * 0, ties * 0
    for start in range(0, size, PART):
        column, x = load_part(logits_ptr, start, size, PART, float("nan"))
        tie = (x == last).to(tl.int32)
        hit = (tie > 0) & (seen + tl.cumsum(tie, axis=0) == ties)
        end = tl.minimum(end, tl.min(tl.where(hit, column + 1, size), axis=0))
        seen += tl.sum(tie, axis=0)
    return end


@triton.jit
def _limits_kernel(
    logits_ptr,
    slot_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    numbers_ptr,
    masses_ptr,
    copied_ptr,
    fits_ptr,
    last_ptr,
    end_ptr,
    stride,
    size,
    num_parts,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    best, last, top_k, top_p, cuts = _row_values(
        best_ptr, slot_ptr, min_p_ptr, top_k_ptr, top_p_ptr, num_parts, WIDTH
    )
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    end = tl.full([], 0, tl.int32) + size
    if cuts:
        at, n_low, m_low, number, mass = _start(
            numbers_ptr, masses_ptr, top_k, top_p, num_parts, WIDTH
        )
        part = tl.arange(0, WIDTH)
        fits = tl.load(fits_ptr + row * num_parts + part, mask=part < num_parts, other=1)
        x_ptr, count = logits_ptr, end
        if tl.min(fits, axis=0) > 0:
            x_ptr, count = copied_ptr + row * num_parts * ROOM, end * 0 + num_parts * ROOM
        low, ties = _key(_level_value(best, last, at)), n_low * 0 - 1
        if (top_k > 0) & (top_k < number):
            low, n_low, m_low, ties = _top_k(x_ptr, count, best, top_k, low, n_low, m_low, PART)
            mass = m_low
        if top_p < 1:
            goal = top_p * mass
            low, ties = _top_p(x_ptr, count, best, goal, low, n_low, m_low, ties, PART)
        if (top_p < 1) | ((top_k > 0) & (top_k < number)):
            last = _value(low)
        if ties >= 0:
            end = _tie_end(logits_ptr, size, last, ties, PART)
    tl.store(last_ptr + row, last)
    tl.store(end_ptr + row, end)


@triton.jit
def _cut_kernel(logits_ptr, last_ptr, end_ptr, stride, size, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    last, end = tl.load(last_ptr + row), tl.load(end_ptr + row)
    if last == float("-inf"):
        return
    logits_ptr += row * stride
    column, x = load_part(logits_ptr, part * PART, size, PART, float("nan"))
    out = (x < last) | ((x == last) & (column >= end))
    tl.store(logits_ptr + column, tl.full([PART], float("-inf"), tl.float32), mask=out)


@dataclass(frozen=True)
class _Scratch:
    best: Tensor  # [n, num_parts] float32
    numbers: Tensor  # [n, num_parts, levels] int32
    masses: Tensor  # the same in float32
    copied: Tensor  # [n, num_parts, room] float32
    fits: Tensor  # [n, num_parts] int32
    last: Tensor  # [n] float32
    end: Tensor  # [n] int32

    @staticmethod
    def make(logits: Tensor) -> "_Scratch":
        n, parts = logits.shape[0], num_parts(logits.shape[1])

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(n, *shape, dtype=dtype, device=logits.device)

        levels, room = LEVELS.value, ROOM.value
        return _Scratch(
            best=make(torch.float32, parts),
            numbers=make(torch.int32, parts, levels),
            masses=make(torch.float32, parts, levels),
            copied=make(torch.float32, parts, room),
            fits=make(torch.int32, parts),
            last=make(torch.float32),
            end=make(torch.int32),
        )


@register(
    "filter_(Tensor(a!) logits, Tensor? temperature, Tensor? min_p, Tensor? top_k, Tensor? top_p, "
    "Tensor? slot, Tensor(b!) best, Tensor(c!) numbers, Tensor(d!) masses, Tensor(e!) copied, "
    "Tensor(f!) fits, Tensor(g!) last, Tensor(h!) end) -> ()"
)
def _filter_(
    logits: Tensor,
    temperature: Tensor | None,
    min_p: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    slot: Tensor | None,
    best: Tensor,
    numbers: Tensor,
    masses: Tensor,
    copied: Tensor,
    fits: Tensor,
    last: Tensor,
    end: Tensor,
) -> None:
    n, parts = best.shape
    sizes = (logits.stride(0), logits.shape[1], parts)
    filters = min_p is not None or top_k is not None
    _temper_kernel[(n, parts)](
        logits, slot, temperature, best if filters else None, *sizes, PART=PART, num_warps=8
    )
    if not filters:
        return
    given = (logits, slot, min_p, top_k, top_p, best, numbers, masses)
    if top_k is not None:
        _sketch_kernel[(n, parts)](*given, *sizes, WIDTH=width(parts), PART=PART, num_warps=8)
        _copy_kernel[(n, parts)](
            *given, copied, fits, *sizes, WIDTH=width(parts), PART=PART, num_warps=8
        )
    _limits_kernel[(n,)](
        *given, copied, fits, last, end, *sizes,
        WIDTH=width(parts), PART=SEARCH_PART, num_warps=SEARCH_WARPS if top_k is not None else 1,
    )  # fmt: skip
    _cut_kernel[(n, parts)](logits, last, end, *sizes[:2], PART=PART, num_warps=8)


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

    All [n], or by slot. top_k_width: not used, because nothing is sorted here
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert (top_k is None) == (top_p is None)
    scratch = vars(_Scratch.make(logits)).values()
    _filter_(logits, temperature, min_p, top_k, top_p, slot, *scratch)
