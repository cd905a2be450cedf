"""Random steps of recurrent layers, to compare kernels with torch."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from stoop.ops.causal_conv import ConvState
from stoop.ops.delta_net import DeltaGates, DeltaState, DeltaWeights
from stoop.ops.recurrent import RecurrentRows

NAN = float("nan")
EPS = 1e-5


@dataclass(frozen=True)
class Row:
    query_len: int
    count: int  # live tokens; 0 for padding and requests that have ended
    context: int = 0
    pending: int = 0


def random_row(rng: random.Random, log_len: int, longest: int) -> Row:
    """Decodes, ends of prompts, chunks, fresh ones of both, dead tokens, and padding."""
    kind = rng.choice(("padding", "ended", "decode", "decode", "chunk", "chunk"))
    if kind == "padding":
        return Row(0, 0)
    query_len = rng.randint(1, log_len) if kind != "chunk" else rng.randint(log_len + 1, longest)
    if kind == "ended":
        return Row(query_len, 0)
    count = query_len if rng.random() < 0.6 else rng.randint(1, query_len)
    if rng.random() < 0.3:  # without context; what its slot says is left from another request
        return Row(query_len, count, 0, rng.randint(0, log_len))
    return Row(query_len, count, rng.randint(1, 50), rng.randint(0, log_len))


def make_rows(
    given: Sequence[Row],
    log_len: int,
    rng: random.Random,
    *,
    extra_tokens: int = 0,
    device: str = "cpu",
) -> tuple[RecurrentRows, int]:
    """The rows in some slots, and the padded number of tokens. The last slot is the sink."""
    sink = len(given) + 2
    chosen = rng.sample(range(sink), len(given))
    slots = [slot if row.count else sink for slot, row in zip(chosen, given, strict=True)]
    pending = torch.full((sink + 1,), 10**6)  # of slots that nothing may ask for
    starts = [0]
    for slot, row in zip(slots, given, strict=True):
        starts.append(starts[-1] + row.query_len)
        if slot != sink:
            pending[slot] = row.pending

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = RecurrentRows(
        query_start_loc=numbers(starts),
        context_lens=numbers([row.context for row in given]),
        seq_lens=numbers([row.context + row.count for row in given]),
        slots=torch.tensor(slots, device=device),
        pending=pending.to(device),
        short=all(row.query_len <= log_len for row in given),
    )
    return rows, starts[-1] + extra_tokens


def random_rows(
    rng: random.Random, log_len: int, *, short: bool, longest: int
) -> tuple[RecurrentRows, int]:
    given = [random_row(rng, log_len, longest) for _ in range(rng.choice((1, 2, 5, 9)))]
    if short:
        given = [row for row in given if row.query_len <= log_len] or [Row(1, 1, 7, log_len)]
    return make_rows(given, log_len, rng, extra_tokens=rng.choice((0, 0, 1, 70)))


def slot_tensor(
    rows: RecurrentRows, shape: Sequence[int], dtype: torch.dtype, std: float
) -> Tensor:
    """State by slot with gaps between slots; NaN in all that a step must not read."""
    num_slots, size, device = len(rows.pending), torch.Size(shape).numel(), rows.slots.device
    whole = torch.full((num_slots, size + 16), NAN, dtype=dtype, device=device)
    tensor = whole[:, :size].unflatten(1, tuple(shape))
    kept = rows.slots[(rows.context_lens > 0) & (rows.seq_lens > rows.context_lens)]
    tensor[kept] = (torch.randn(len(kept), *shape, device=device) * std).to(dtype)
    return tensor


def poison_log(rows: RecurrentRows, log: Tensor) -> Tensor:
    """NaN in entries that do not count."""
    place = torch.arange(log.shape[1], device=log.device)
    dead = place[None, :] >= rows.pending[:, None]
    log[dead] = NAN
    return log


@dataclass(frozen=True)
class ConvCase:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: RecurrentRows
    state: ConvState


def make_conv(
    rows: RecurrentRows,
    num_tokens: int,
    channels: int,
    width: int,
    log_len: int,
    dtype: torch.dtype,
    *,
    gated: bool,
    bias: bool = False,
) -> ConvCase:
    device = rows.slots.device
    inputs = channels * 3 if gated else channels

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    wide = draw(num_tokens, inputs + 16)
    log = slot_tensor(rows, (log_len, channels), dtype, 1.0)
    return ConvCase(
        x=wide[:, :inputs],
        weight=draw(channels, 1, width),
        bias=draw(channels) if bias else None,
        rows=rows,
        state=ConvState(
            slot_tensor(rows, (width - 1, channels), dtype, 1.0), poison_log(rows, log)
        ),
    )


@dataclass(frozen=True)
class DeltaShape:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class DeltaCase:
    qkv: Tensor
    gates: DeltaGates
    weights: DeltaWeights
    rows: RecurrentRows
    state: DeltaState

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.qkv, self.gates, self.weights, self.rows, self.state)


def make_weights(shape: DeltaShape, dtype: torch.dtype, device: Any = "cpu") -> DeltaWeights:
    """Heads that forget at once, and heads that hardly do."""
    heads = shape.value_heads
    return DeltaWeights(
        a_log=torch.linspace(-6, 2.5, heads, device=device)[torch.randperm(heads)],
        dt_bias=torch.randn(heads, device=device),
        norm=(torch.rand(shape.value_dim, device=device) + 0.5).to(dtype),
        eps=EPS,
    )


def make_gates(
    shape: DeltaShape, num_tokens: int, dtype: torch.dtype, device: Any = "cpu"
) -> DeltaGates:
    """Columns of one projection."""
    heads, values = shape.value_heads, shape.value_heads * shape.value_dim
    wide = torch.randn(num_tokens, 64 + values + 2 * heads, device=device).to(dtype)
    return DeltaGates(*wide[:, 64:].split((values, heads, heads), dim=1))


def make_delta(
    rows: RecurrentRows, num_tokens: int, shape: DeltaShape, log_len: int, dtype: torch.dtype
) -> DeltaCase:
    device, wide = rows.slots.device, torch.float32
    keys = (log_len, shape.key_heads, shape.key_dim)
    updates = (log_len, shape.value_heads, shape.value_dim)
    matrix = (shape.value_heads, shape.key_dim, shape.value_dim)
    state = DeltaState(
        matrix=slot_tensor(rows, matrix, wide, 0.3),
        key_log=poison_log(rows, slot_tensor(rows, keys, wide, shape.key_dim**-0.5)),
        update_log=poison_log(rows, slot_tensor(rows, updates, wide, 1.0)),
        decay_log=poison_log(rows, slot_tensor(rows, updates[:2], wide, 1.0).abs_().clamp_(max=1)),
    )
    return DeltaCase(
        qkv=torch.randn(num_tokens, shape.channels, device=device).to(dtype),
        gates=make_gates(shape, num_tokens, dtype, device),
        weights=make_weights(shape, dtype, device),
        rows=rows,
        state=state,
    )


def copied(case: Any) -> Any:
    return copy.deepcopy(case)


def bits(tensor: Tensor) -> Tensor:
    """To compare NaN, too."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def check_state(ours: Any, theirs: Any, before: Any, rows: RecurrentRows, **limits: float) -> None:
    """Equal in the slots of live rows; untouched in all others, and between slots."""
    written = torch.zeros(len(rows.pending), dtype=torch.bool)
    written[rows.slots[rows.seq_lens > rows.context_lens].cpu()] = True
    for field in fields(ours):
        mine, expected = getattr(ours, field.name), getattr(theirs, field.name)
        old = getattr(before, field.name)
        assert torch.equal(bits(mine)[~written], bits(old)[~written]), field.name
        torch.testing.assert_close(
            mine[written],
            expected[written],
            equal_nan=True,
            msg=lambda text, name=field.name: f"{name}: {text}",
            **limits,
        )
        gaps = [each.as_strided((len(each), 16), (each.stride(0), 1), each[0].numel())
                for each in (mine, old)]  # fmt: skip
        if mine.stride(0) > mine[0].numel():
            assert torch.equal(bits(gaps[0]), bits(gaps[1])), field.name
