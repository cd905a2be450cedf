"""Cases of paged attention over random pages, run by the kernels and by dense attention.

Caches hold NaN wherever no live key is, and block tables name blocks that no cache has.
"""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoop.ops.kv_store import NO_SCALES, KVScales, to_fp8

POISON_BLOCK = 2**30
NAN = float("nan")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_SMS = 132  # of an H200


@dataclass(frozen=True)
class Row:
    context: int
    query_len: int
    dead: int = 0  # of the query tokens, the last ones

    @property
    def seq_len(self) -> int:
        return self.context + self.query_len - self.dead


@dataclass(frozen=True)
class Heads:
    num_kv: int
    group: int
    size: int


THREE_A_GROUP = Heads(2, 3, 16)
LLAMA_8B = Heads(8, 4, 128)


@dataclass(frozen=True)
class Case:
    rows: list[Row]
    q: Tensor
    cache: Tensor
    query_start_loc: Tensor
    context_lens: Tensor
    seq_lens: Tensor
    row_slots: Tensor
    block_table: Tensor
    scales: KVScales = NO_SCALES  # of a cache in fp8


def in_fp8(case: Case, scales: KVScales = NO_SCALES) -> Case:
    """The case with its keys and values rounded to fp8; NaN stays where no key is."""
    parts = [to_fp8(part, scale) for part, scale in zip(case.cache, scales, strict=True)]
    return dataclasses.replace(case, cache=torch.stack(parts), scales=scales)


def make_case(
    rows: list[Row],
    heads: Heads = THREE_A_GROUP,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    padded_rows: int = 0,
    padded_tokens: int = 0,
    device: torch.device = CPU,
) -> Case:
    """Pages in random order, queries as a view of a larger tensor, padding after the live part."""
    source = random.Random(len(rows))
    num_reqs, query_lens = len(rows) + padded_rows, [row.query_len for row in rows]
    num_tokens = sum(query_lens) + padded_tokens
    num_pages = [-(-row.seq_len // block_size) for row in rows]
    blocks = list(range(1, sum(num_pages) + 2))
    source.shuffle(blocks)
    slots = source.sample(range(num_reqs + 1), len(rows))
    table = torch.full((num_reqs + 2, max(num_pages, default=0) + 2), POISON_BLOCK)
    table[-1] = 0  # the sink's
    shape = (2, len(blocks) + 1, block_size, heads.num_kv, heads.size)
    cache = torch.full(shape, NAN, device=device, dtype=dtype)
    for row, slot, pages in zip(rows, slots, num_pages, strict=True):
        mine = torch.tensor([blocks.pop() for _ in range(pages)], dtype=torch.int64)
        table[slot, :pages] = mine
        live = torch.full((2, pages * block_size, heads.num_kv, heads.size), NAN, device=device)
        live[:, : row.seq_len] = torch.randn(2, row.seq_len, *shape[3:], device=device)
        cache[:, mine.to(device)] = live.view(2, pages, *shape[2:]).to(dtype)
    wide = torch.randn(num_tokens, heads.num_kv * (heads.group + 2), heads.size, device=device)
    wide[sum(query_lens) :] = NAN

    def numbers(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    none = [0] * padded_rows
    starts = [sum(query_lens[:n]) for n in range(len(rows) + 1)]
    return Case(
        rows=rows,
        q=wide.to(dtype)[:, : heads.num_kv * heads.group],
        cache=cache,
        query_start_loc=numbers(starts + [starts[-1]] * padded_rows),
        context_lens=numbers([row.context for row in rows] + none),
        seq_lens=numbers([row.seq_len for row in rows] + none),
        row_slots=numbers(slots + [num_reqs + 1] * padded_rows, torch.int64),
        block_table=table.to(torch.int32).to(device),
    )


def attend_densely(case: Case, window: int = 0) -> Tensor:
    """[tokens, heads, head_dim] in the dtype of q, computed in float64; zeros for padding."""
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=case.q.device)
    begin, block_size = 0, case.cache.shape[2]
    group = case.q.shape[1] // case.cache.shape[3]
    for row, slot in zip(case.rows, case.row_slots.tolist(), strict=False):
        key = torch.arange(row.seq_len, device=case.q.device)
        pages = case.block_table[slot].long()[key // block_size]
        gathered = case.cache[:, pages, key % block_size].double()  # [2, keys, kv_heads, head_dim]
        gathered *= torch.tensor(case.scales, device=case.q.device)[:, None, None, None].double()
        keys, values = gathered.repeat_interleave(group, dim=2)
        query = torch.arange(row.query_len, device=case.q.device) + row.context
        query = query.clamp(max=row.seq_len - 1)[:, None]  # a dead one sees what the last does
        seen = key <= query
        if window:
            seen &= key > query - window
        q = case.q[begin : begin + row.query_len].double()
        scores = torch.einsum("qhd,khd->hqk", q, keys) * case.q.shape[2] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[begin : begin + row.query_len] = torch.einsum("hqk,khd->qhd", weights, values)
        begin += row.query_len
    return out.to(case.q.dtype)


def attend(
    case: Case, window: int = 0, max_query_len: int = 0, num_sms: int = 4, splits: int | None = None
) -> Tensor:
    """Run the kernels. What they do not write stays NaN."""
    from stoop.ops.kernels import attention as kernels

    q, num_kv_heads = case.q, case.cache.shape[3]
    num_reqs = case.row_slots.shape[0]
    plan = kernels.plan_attention(q, num_kv_heads, num_reqs, max_query_len, num_sms)
    if splits is not None and plan.num_parts:
        parts = plan.num_parts // plan.num_splits * splits
        plan = dataclasses.replace(plan, num_splits=splits, num_parts=parts)
    out = torch.full(q.shape, NAN, dtype=q.dtype, device=q.device)
    kernels.paged_attention(
        q,
        case.cache,
        case.query_start_loc,
        case.context_lens,
        case.seq_lens,
        case.row_slots,
        case.block_table,
        q.shape[2] ** -0.5 * case.scales.k,
        case.scales.v,
        window,
        plan.max_query_len,
        plan.mixed,
        plan.num_splits,
        torch.full((plan.partial_size(q.shape[2]),), NAN, device=q.device),
        out,
    )
    return out


def assert_right(case: Case, **options: Any) -> None:
    ours, dense = attend(case, **options), attend_densely(case, options.get("window", 0))
    limits = {"rtol": 1e-5, "atol": 1e-5}
    if case.q.dtype != torch.float32:
        limits = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(ours, dense, **limits)
    assert not ours[sum(row.query_len for row in case.rows) :].any()  # padding: zeros, not NaN


# ---- how fast ----


@dataclass(frozen=True)
class Load:
    """A batch over caches that together exceed the L2 cache."""

    q: Tensor
    caches: list[Tensor]
    arguments: tuple[Tensor, ...]
    max_query_len: int

    def run(self, cache: Tensor) -> None:
        from stoop.ops.kernels import attention as kernels

        num_reqs = self.arguments[3].shape[0]
        plan = kernels.plan_attention(self.q, cache.shape[3], num_reqs, self.max_query_len, NUM_SMS)
        kernels.paged_attention(
            self.q,
            cache,
            *self.arguments,
            self.q.shape[2] ** -0.5,
            1.0,
            0,
            plan.max_query_len,
            plan.mixed,
            plan.num_splits,
            torch.empty(plan.partial_size(self.q.shape[2]), device=CUDA),
            torch.empty_like(self.q),
        )

    def milliseconds(self) -> float:
        """The time of one call, in a graph with one call per cache."""
        from stoop.ops.kernels.linear_tuning import time_graph

        every = time_graph(lambda: [self.run(cache) for cache in self.caches], repeats=10)
        return every / len(self.caches)


def make_load(batch: int, context: int, query_len: int, heads: Heads, bound: int) -> Load:
    pages = -(-(context + query_len) // 16)
    shape = (2, batch * pages + 1, 16, heads.num_kv, heads.size)
    num_bytes = 2 * torch.Size(shape).numel()
    num_caches = min(32, 2**29 // num_bytes + 1)
    table = torch.randperm(batch * pages, device=CUDA).view(batch, pages).to(torch.int32) + 1

    def every(value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device=CUDA)

    starts = torch.arange(batch + 1, dtype=torch.int32, device=CUDA) * query_len
    slots = torch.arange(batch, device=CUDA)
    num_heads = heads.num_kv * heads.group
    return Load(
        torch.randn(batch * query_len, num_heads, heads.size, device=CUDA).bfloat16(),
        [torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for _ in range(num_caches)],
        (starts, every(context), every(context + query_len), slots, table),
        bound,
    )
