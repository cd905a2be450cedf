"""Phases I and U and the KV store against slow twins, over whole padded extents."""

import random
from dataclasses import dataclass, fields
from itertools import pairwise

import pytest
import torch
from helpers import make_rules
from hypothesis import given, settings
from hypothesis import strategies as st

from stoop.batch.input_batch import InputBuffers
from stoop.batch.request_state import RequestState
from stoop.core.step import PlannedRow
from stoop.ops.inputs import SlotTensors, commit_tokens
from stoop.ops.kv_store import store_kv

CPU = torch.device("cpu")
SLOTS, MAX_LEN, BLOCK, MAX_TOKENS = 5, 21, 4, 30
MAX_BLOCKS = -(-MAX_LEN // BLOCK)
SETTINGS = settings(derandomize=True, deadline=None, max_examples=120)


@dataclass
class Row:
    slot: int
    num_computed: int
    num_tokens: int  # of this step
    num_known: int


def planned(rows: list[Row]) -> list[PlannedRow]:
    rules = make_rules()
    return [
        PlannedRow(
            f"r{row.slot}",
            0,
            row.slot,
            row.num_tokens,
            row.num_computed,
            row.num_computed + row.num_tokens == row.num_known,
            rules,
            1,
        )
        for row in rows
    ]


def random_rows(rng: random.Random) -> list[Row]:
    rows, budget = [], MAX_TOKENS
    for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
        known = rng.randint(1, MAX_LEN - 1)
        computed = rng.randint(0, known - 1)
        count = rng.choice((1, known - computed, rng.randint(1, known - computed)))
        count = min(count, budget)
        if count:
            rows.append(Row(slot, computed, count, known))
            budget -= count
    return rows


def random_state(rng: random.Random, rows: list[Row]) -> RequestState:
    """Every slot full of what former holders may have left; live slots as the rows say."""
    state = RequestState(SLOTS, MAX_LEN, BLOCK, CPU)
    slots = state.tensors
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    slots.token_ids.random_(1, 1000, generator=generator)
    slots.block_table.random_(1, 1000, generator=generator)
    slots.num_tokens.random_(0, MAX_LEN, generator=generator)
    slots.num_computed.random_(0, MAX_LEN, generator=generator)
    slots.num_tokens[-1] = slots.num_computed[-1] = 0
    for row in rows:
        slots.num_tokens[row.slot] = row.num_known
        slots.num_computed[row.slot] = row.num_computed
    return state


def poisoned_buffers() -> InputBuffers:
    """Buffers as a larger step with wild values would leave them."""
    buffers = InputBuffers(SLOTS, MAX_TOKENS, MAX_BLOCKS, CPU)
    for group in (buffers.rows, buffers.step):
        for field in fields(group):
            getattr(group, field.name).fill_(True if field.name == "samples" else 77)
    return buffers


def expected_step(slots: SlotTensors, rows: list[Row]) -> dict[str, list]:
    """The slow twin: one row, one token at a time."""
    out: dict[str, list] = {
        "input_ids": [0] * MAX_TOKENS,
        "positions": [0] * MAX_TOKENS,
        "slot_mapping": [-1] * MAX_TOKENS,
        "seq_lens": [0] * SLOTS,
        "block_rows": [[0] * MAX_BLOCKS for _ in range(SLOTS)],
        "last_token_indices": [0] * SLOTS,
        "samples": [False] * SLOTS,
        "row_slots": [slots.sink] * SLOTS,
    }
    token = 0
    for index, row in enumerate(rows):
        table = slots.block_table[row.slot].tolist()
        for position in range(row.num_computed, row.num_computed + row.num_tokens):
            out["input_ids"][token] = int(slots.token_ids[row.slot, position])
            out["positions"][token] = position
            out["slot_mapping"][token] = table[position // BLOCK] * BLOCK + position % BLOCK
            token += 1
        out["seq_lens"][index] = row.num_computed + row.num_tokens
        out["block_rows"][index] = table
        out["last_token_indices"][index] = token - 1
        out["row_slots"][index] = row.slot
        out["samples"][index] = row.num_computed + row.num_tokens == row.num_known
    return out


def check_extents(buffers: InputBuffers, slots: SlotTensors, rows: list[Row]) -> None:
    for name, expected in expected_step(slots, rows).items():
        assert getattr(buffers.step, name).tolist() == expected, name
    padding = SLOTS - len(rows)
    assert buffers.rows.idx_mapping.tolist() == [r.slot for r in rows] + [-1] * padding
    starts = buffers.rows.query_start_loc.tolist()
    total = sum(r.num_tokens for r in rows)
    assert starts[0] == 0 and starts[len(rows) :] == [total] * (padding + 1)
    lengths = [b - a for a, b in pairwise(starts)]
    assert lengths[: len(rows)] == [r.num_tokens for r in rows]


@SETTINGS
@given(st.integers(0, 2**32))
def test_inputs_equal_the_slow_twin_over_poisoned_buffers(seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng)
    state, buffers = random_state(rng, rows), poisoned_buffers()
    before = {f.name: getattr(state.tensors, f.name).clone() for f in fields(state.tensors)}
    batch = buffers.load_rows(planned(rows))
    buffers.fill(state, BLOCK)
    check_extents(buffers, state.tensors, rows)
    for name, value in before.items():  # phase I only reads slot state
        assert torch.equal(getattr(state.tensors, name), value), name
    assert batch.num_reqs == len(rows)
    assert batch.num_tokens == sum(r.num_tokens for r in rows)
    assert batch.max_seq_len == max(r.num_computed + r.num_tokens for r in rows)


def test_nothing_of_a_large_step_remains_after_a_small_one() -> None:
    rng = random.Random(0)
    large = [Row(slot, 3, 6, 9) for slot in range(SLOTS)]
    small = [Row(2, 9, 1, 10)]
    buffers = InputBuffers(SLOTS, MAX_TOKENS, MAX_BLOCKS, CPU)
    for rows in (large, small):
        state = random_state(rng, rows)
        buffers.load_rows(planned(rows))
        buffers.fill(state, BLOCK)
        check_extents(buffers, state.tensors, rows)


def test_buffers_keep_their_addresses() -> None:
    buffers = InputBuffers(SLOTS, MAX_TOKENS, MAX_BLOCKS, CPU)
    tensors = [getattr(g, f.name) for g in (buffers.rows, buffers.step) for f in fields(g)]
    before = [t.data_ptr() for t in tensors]
    rows = [Row(1, 0, 5, 5)]
    buffers.load_rows(planned(rows))
    buffers.fill(random_state(random.Random(1), rows), BLOCK)
    assert [t.data_ptr() for t in tensors] == before


def test_too_many_tokens_are_refused() -> None:
    buffers = InputBuffers(SLOTS, 4, MAX_BLOCKS, CPU)
    with pytest.raises(AssertionError):
        buffers.load_rows(planned([Row(0, 0, 5, 5)]))


@SETTINGS
@given(st.integers(0, 2**32))
def test_commit_equals_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng)
    state, buffers = random_state(rng, rows), poisoned_buffers()
    slots = state.tensors
    buffers.load_rows(planned(rows))
    buffers.fill(state, BLOCK)
    sampled = torch.tensor([5000 + i for i in range(SLOTS)])
    tokens = slots.token_ids[:-1].tolist()
    num_tokens = slots.num_tokens.tolist()
    num_computed = slots.num_computed.tolist()
    table, prompts = slots.block_table.clone(), slots.num_prompt_tokens.clone()
    commit_tokens(slots, buffers.rows, buffers.step, sampled)
    for index, row in enumerate(rows):
        num_computed[row.slot] += row.num_tokens
        if num_computed[row.slot] == num_tokens[row.slot]:
            tokens[row.slot][num_tokens[row.slot]] = 5000 + index
            num_tokens[row.slot] += 1
    assert slots.token_ids[:-1].tolist() == tokens
    assert slots.num_tokens.tolist() == num_tokens  # the sink's counters stay 0 too
    assert slots.num_computed.tolist() == num_computed
    assert torch.equal(slots.block_table, table)
    assert torch.equal(slots.num_prompt_tokens, prompts)


def test_last_token_of_a_full_history_is_written_at_its_end() -> None:
    rows = [Row(0, MAX_LEN - 2, 1, MAX_LEN - 1)]
    state, buffers = random_state(random.Random(2), rows), poisoned_buffers()
    buffers.load_rows(planned(rows))
    buffers.fill(state, BLOCK)
    commit_tokens(state.tensors, buffers.rows, buffers.step, torch.full((SLOTS,), 4321))
    assert state.tensors.token_ids[0, -1] == 4321
    assert state.tensors.num_tokens[0] == MAX_LEN


# ---- the KV store ----


def random_cache() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 6, BLOCK, 2, 3, generator=generator, dtype=torch.float64)


def test_store_writes_each_place_once_and_nothing_else() -> None:
    cache = random_cache()
    expected = cache.clone()
    mapping = [5, -1, 23, 9, -1]
    k, v = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    for token, place in enumerate(mapping):
        if place >= 0:
            expected[0, place // BLOCK, place % BLOCK] = k[token]
            expected[1, place // BLOCK, place % BLOCK] = v[token]
    store_kv(k, v, cache, torch.tensor(mapping))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("count", [1, 7])
def test_padding_alone_changes_no_bit(count: int) -> None:
    cache = random_cache()
    before = cache.clone()
    k = torch.full((count, 2, 3), float("nan"), dtype=torch.float64)
    store_kv(k, k, cache, torch.full((count,), -1))
    assert torch.equal(cache, before)


@SETTINGS
@given(st.integers(0, 2**32))
def test_padded_tokens_of_a_step_leave_the_cache_alone(seed: int) -> None:
    """The whole padded extent is stored: only the places of live tokens change."""
    rng = random.Random(seed)
    rows = random_rows(rng)
    state, buffers = random_state(rng, rows), poisoned_buffers()
    places = list(range(1, SLOTS * MAX_BLOCKS + 1))
    rng.shuffle(places)
    table = torch.tensor(places, dtype=torch.int32).view(SLOTS, MAX_BLOCKS)
    state.tensors.block_table[:-1] = table
    state.tensors.block_table[-1] = 0
    buffers.load_rows(planned(rows))
    buffers.fill(state, BLOCK)
    cache = torch.zeros(2, SLOTS * MAX_BLOCKS + 1, BLOCK, 1, 1)
    ones = torch.ones(MAX_TOKENS, 1, 1)
    store_kv(ones, ones, cache, buffers.step.slot_mapping)
    assert not cache[:, 0].any(), "the null block was written"
    assert int(cache[0].sum()) == int(cache[1].sum()) == sum(r.num_tokens for r in rows)
