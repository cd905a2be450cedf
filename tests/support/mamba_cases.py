"""Cases of Mamba-2 over random rows, run by the kernels and by the reference in float64.

Slots that no row may read hold NaN, and so does every output before it is written.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stoop.ops.mamba import MambaState, MambaWeights
from stoop.ops.mamba import mamba as operation
from stoop.ops.recurrent import RecurrentRows

NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    heads: int
    head_dim: int
    state_size: int
    groups: int = 1
    log_len: int = 4
    dtype: torch.dtype = torch.float32
    dt_min: float = 0.0
    dt_max: float = float("inf")

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        return self.inner + 2 * self.groups * self.state_size


@dataclass(frozen=True)
class Row:
    context: int
    query_len: int
    dead: int = 0  # of the query tokens, the last ones
    pending: int = 0

    @property
    def live(self) -> int:
        return self.query_len - self.dead


@dataclass(frozen=True)
class Case:
    shape: Shape
    rows: list[Row]
    xbc: Tensor
    dt: Tensor
    weights: MambaWeights
    step: RecurrentRows
    state: MambaState

    @property
    def live_tokens(self) -> Tensor:
        """[tokens] bool"""
        live = torch.zeros(len(self.xbc), dtype=torch.bool)
        for row, begin in zip(self.rows, self.step.query_start_loc.tolist(), strict=False):
            live[begin : begin + max(row.live, 0)] = True
        return live.to(self.xbc.device)


def make_weights(shape: Shape, device: str = "cpu") -> MambaWeights:
    a_log, dt_bias, d = torch.randn(3, shape.heads, device=device)
    return MambaWeights(a_log, dt_bias - 3, d, shape.dt_min, shape.dt_max)


def make_state(shape: Shape, num_slots: int, device: str = "cpu") -> MambaState:
    """As the engine has it: tensors side by side in each slot, so that slots lie apart."""
    log, groups = shape.log_len, shape.groups
    shapes = (
        (shape.heads, shape.head_dim, shape.state_size),
        (log, shape.heads, shape.head_dim),
        (log, 2, groups, shape.state_size),
        (log, 2, shape.heads),
    )
    sizes = [torch.Size(each).numel() for each in shapes]
    room = [(size + 3) // 4 * 4 for size in sizes]
    memory = torch.randn(num_slots + 1, sum(room) + 64, device=device)
    tensors, start = [], 0
    for size, taken, inner in zip(sizes, room, shapes, strict=True):
        tensors.append(memory[:, start : start + size].unflatten(1, inner))
        start += taken
    tensors[3].sigmoid_()
    return MambaState(*tensors)


def make_inputs(shape: Shape, num_tokens: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """xbc, and dt as columns of a wider projection."""
    xbc = torch.randn(num_tokens, shape.width, device=device).to(shape.dtype)
    projected = torch.randn(num_tokens, shape.heads + 24, device=device).to(shape.dtype)
    return xbc, projected[:, 8 : 8 + shape.heads]


def make_rows(
    rows: list[Row], slots: list[int], num_slots: int, log_len: int, device: str = "cpu"
) -> RecurrentRows:
    starts = torch.tensor([0] + [row.query_len for row in rows]).cumsum(0)
    pending = torch.zeros(num_slots + 1, dtype=torch.int64)
    for row, slot in zip(rows, slots, strict=True):
        pending[slot] = row.pending
    lengths = [(row.context, row.context + row.live) if row.live else (0, 0) for row in rows]
    contexts, seq_lens = torch.tensor(lengths, dtype=torch.int32).t().contiguous()
    return RecurrentRows(
        query_start_loc=starts.int().to(device),
        context_lens=contexts.to(device),
        seq_lens=seq_lens.to(device),
        slots=torch.tensor(slots).to(device),
        pending=pending.to(device),
        short=all(row.query_len <= log_len for row in rows),
    )


def make_case(
    shape: Shape, rows: list[Row], padding: int = 0, spare: int = 2, device: str = "cpu"
) -> Case:
    """padding: tokens after the last row; spare: slots of no row"""
    num_slots = len(rows) + spare
    free = random.sample(range(num_slots), num_slots)
    slots = [free.pop() if row.live else num_slots for row in rows]
    state = make_state(shape, num_slots, device)
    for slot, row in zip(slots, rows, strict=True):
        if row.context == 0:
            for tensor in all_tensors(state):
                tensor[slot] = NAN
    num_tokens = sum(row.query_len for row in rows) + padding
    step = make_rows(rows, slots, num_slots, shape.log_len, device)
    xbc, dt = make_inputs(shape, num_tokens, device)
    weights = make_weights(shape, device)
    case = Case(shape, rows, xbc, dt, weights, step, state)
    xbc[~case.live_tokens] = NAN
    return case


def all_tensors(state: MambaState) -> list[Tensor]:
    return [getattr(state, field.name) for field in fields(state)]


def copy_of(state: MambaState, dtype: torch.dtype = torch.float32) -> MambaState:
    """With the same strides, if the dtype stays."""
    if dtype != torch.float32:
        return MambaState(*(tensor.to(dtype) for tensor in all_tensors(state)))
    copies = []
    for tensor in all_tensors(state):
        room = torch.zeros(tensor.shape[0], tensor.stride(0), device=tensor.device)
        copies.append(room[:, : tensor[0].numel()].unflatten(1, tensor.shape[1:]))
        copies[-1].copy_(tensor)
    return MambaState(*copies)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN."""
    plain = Tensor.new_empty

    def new_empty(self: Tensor, *args: Any, **options: Any) -> Tensor:
        made = plain(self, *args, **options)
        return made.fill_(NAN) if made.is_floating_point() else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", new_empty)
        yield


def run_reference(case: Case) -> tuple[Tensor, MambaState]:
    """In float64."""
    state, given = copy_of(case.state, torch.float64), case.weights
    wide = (each.double() for each in (given.a_log, given.dt_bias, given.d))
    weights = MambaWeights(*wide, given.dt_min, given.dt_max)
    out = operation.reference(case.xbc.double(), case.dt.double(), weights, case.step, state)
    return out, state


def run_kernel(case: Case) -> tuple[Tensor, MambaState]:
    state = copy_of(case.state)
    with poisoned_memory():
        out = operation.kernel(case.xbc, case.dt, case.weights, case.step, state)
    return out, state


def assert_right(case: Case, rtol: float, atol: float) -> None:
    """Outputs and touched slots equal the reference's; everything else has its old bytes."""
    exact, expected = run_reference(case)
    out, state = run_kernel(case)
    narrow = case.shape.dtype != torch.float32
    limits = {"rtol": 1e-2, "atol": 1e-2} if narrow else {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(out.double(), exact, **limits)
    assert not out[~case.live_tokens].any()
    touched = torch.zeros(len(case.state.matrix), dtype=torch.bool, device=out.device)
    touched[case.step.slots] = True
    touched[-1] = False
    for before, after, right in zip(*map(all_tensors, (case.state, state, expected)), strict=True):
        torch.testing.assert_close(
            after[touched].double(), right[touched], rtol=rtol, atol=atol, equal_nan=True
        )
        kept = before[~touched].contiguous(), after[~touched].contiguous()
        assert torch.equal(*(each.view(torch.int32) for each in kept))


def random_rows(shape: Shape, count: int, longest: int = 0) -> list[Row]:
    """Short rows, some of them fresh, with dead tokens or without live ones; with `longest`, some
    are prompts."""
    rows = []
    for _ in range(count):
        long = bool(longest) and random.random() < 0.5
        query_len = random.randint(shape.log_len + 1, longest) if long else 0
        query_len = query_len or random.randint(0, shape.log_len)
        dead = random.choice((0, 0, 1, query_len // 2, query_len))
        context = random.choice((0, 1, 5, 1000, 2**20 + 1))
        pending = random.randint(0, min(shape.log_len, context))
        rows.append(Row(context, query_len, min(dead, query_len), pending))
    return rows


# ---- decoding with drafts ----


@dataclass(frozen=True)
class Text:
    """The inputs of whole requests, with what comes of rejected drafts."""

    shape: Shape
    weights: MambaWeights
    xbc: Tensor  # [requests, tokens, width]
    dt: Tensor  # [requests, tokens, heads]

    @classmethod
    def draw(cls, shape: Shape, requests: int, tokens: int, device: str = "cpu") -> "Text":
        xbc, dt = make_inputs(shape, requests * tokens, device)
        parts = xbc.unflatten(0, (requests, tokens)), dt.unflatten(0, (requests, tokens))
        return cls(shape, make_weights(shape, device), *parts)

    def decode(self, log_len: int) -> tuple[Tensor, MambaState]:
        """Decode with up to `log_len` tokens a step, of which a random number counts, then the last
        token, so that all before it are folded. Returns the outputs of all but the last token, and
        the state."""
        requests, tokens, _ = self.xbc.shape
        device = str(self.xbc.device)
        shape = replace(self.shape, log_len=log_len)
        state = make_state(shape, requests, device)
        for tensor in all_tensors(state):
            tensor.fill_(NAN)
        done, pending = [0] * requests, [0] * requests
        outputs = torch.full((requests, tokens, shape.inner), NAN, device=device)
        finished = False
        while not finished:
            finished = min(done) == tokens - 1
            rows = [
                Row(at, min(random.randint(1, log_len), tokens - at), 0, waiting)
                for at, waiting in zip(done, pending, strict=True)
            ]
            step = make_rows(rows, list(range(requests)), requests, log_len, device)
            taken = [slice(at, at + row.query_len) for at, row in zip(done, rows, strict=True)]
            xbc = torch.cat([self.xbc[r, each] for r, each in enumerate(taken)])
            dt = torch.cat([self.dt[r, each] for r, each in enumerate(taken)])
            out = operation.kernel(xbc, dt, self.weights, step, state)
            for r, part in enumerate(out.split([row.query_len for row in rows])):
                outputs[r, taken[r]] = part.float()
                pending[r] = min(random.randint(1, rows[r].query_len), tokens - 1 - done[r])
                done[r] += pending[r]
        return outputs[:, :-1], state
