"""Phases I and U and the KV store against slow twins, over whole padded extents."""

import random
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoop.batch.input_batch import InputBuffers
from stoop.ops.inputs import (
    PADDING,
    TOKEN_BUFFERS,
    SlotTensors,
    StepTensors,
    StopTensors,
    commit_tokens,
)
from stoop.ops.kv_store import store_kv
from support.slot_state import (
    BLOCK,
    CPU,
    MAX_BLOCKS,
    MAX_LEN,
    MAX_TOKENS,
    NUM_DRAFTS,
    SLOTS,
    Row,
    Snapshot,
    no_stops,
    planned,
    poison,
    poisoned_buffers,
    random_rows,
    random_state,
    random_stops,
)

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)


def expected_step(slots: SlotTensors, rows: list[Row]) -> dict[str, list]:
    """The slow twin: one row, one token at a time."""
    out: dict[str, list] = {
        "input_ids": [0] * MAX_TOKENS,
        "positions": [0] * MAX_TOKENS,
        "slot_mapping": [-1] * MAX_TOKENS,
        "context_lens": [0] * SLOTS,
        "seq_lens": [0] * SLOTS,
        "last_token_indices": [0] * SLOTS,
        "samples": [0] * SLOTS,
        "row_drafts": [0] * SLOTS,
        "row_slots": [slots.sink] * SLOTS,
    }
    token = 0
    for index, row in enumerate(rows):
        if row.ended:  # as padding, but that its tokens have a place
            token += row.num_tokens
            continue
        table = slots.block_table[row.slot].tolist()
        end = row.num_known + row.num_drafts
        out["row_slots"][index] = row.slot
        out["context_lens"][index] = out["seq_lens"][index] = row.num_computed
        for position in range(row.num_computed, row.num_computed + row.num_tokens):
            if position < end:  # else dead, and as padding
                out["input_ids"][token] = int(slots.token_ids[row.slot, position])
                out["positions"][token] = position
                out["slot_mapping"][token] = table[position // BLOCK] * BLOCK + position % BLOCK
                out["seq_lens"][index] = position + 1
                if position < row.num_known:
                    out["last_token_indices"][index] = token
                    out["samples"][index] = int(position == row.num_known - 1)
                else:
                    out["row_drafts"][index] += 1
            token += 1
    return out


def check_extents(buffers: InputBuffers, slots: SlotTensors, rows: list[Row]) -> None:
    expected = expected_step(slots, rows)
    assert set(expected) == {f.name for f in fields(buffers.step)}
    for name, values in expected.items():
        assert getattr(buffers.step, name).tolist() == values, name
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
    before = Snapshot.of(state.tensors)
    sink = state.tensors.token_ids[-1].clone()
    batch = buffers.load_rows(planned(rows))
    buffers.fill(state.tensors, BLOCK)
    check_extents(buffers, state.tensors, rows)
    before.check(state.tensors)  # phase I only reads slot state
    assert torch.equal(state.tensors.token_ids[-1], sink)
    assert batch.num_reqs == batch.num_reqs_padded == len(rows)
    assert batch.num_tokens == batch.num_tokens_padded == sum(r.num_tokens for r in rows)
    # Bounds of the host, which counts dead tokens up to the model's limit.
    bounds = [min(r.num_computed + r.num_tokens, MAX_LEN) for r in rows]
    assert batch.seq_lens_cpu_upper_bound.tolist() == bounds
    assert batch.max_seq_len == max(bounds)
    assert all(bound >= r.seq_len for bound, r in zip(bounds, rows, strict=True))
    places = [row.num_tokens for row in batch.plan_rows if row.decodes]
    assert batch.num_places == max(places, default=1)


def test_random_rows_reach_every_kind() -> None:
    """What the twins are held against: dead tokens, drafts cut off, chunks, the last position."""
    rows = [row for seed in range(240) for row in random_rows(random.Random(seed))]
    assert sum(r.num_tokens > r.num_live for r in rows) > 50
    assert sum(r.num_verified == NUM_DRAFTS for r in rows) > 50
    assert sum(0 < r.num_verified < r.num_drafts for r in rows) > 5
    assert sum(not r.samples for r in rows) > 50
    assert sum(r.num_known == MAX_LEN - 1 and r.num_tokens > 1 for r in rows) > 50
    assert sum(r.ended and r.num_known - r.num_computed == 1 for r in rows) > 20


def test_dead_tokens_of_a_decode_look_like_padding() -> None:
    """Four places, one draft: two live tokens, then two that write and read nothing."""
    rows = [Row(1, 9, 4, 10, 1), Row(3, 19, 4, 20, 0)]
    state, buffers = random_state(random.Random(5), rows), poisoned_buffers()
    buffers.load_rows(planned(rows))
    buffers.fill(state.tensors, BLOCK)
    step = buffers.step
    assert (step.slot_mapping >= 0).long().tolist()[:8] == [1, 1, 0, 0, 1, 0, 0, 0]
    assert step.positions.tolist()[:8] == [9, 10, 0, 0, 19, 0, 0, 0]
    assert step.seq_lens.tolist()[:2] == [11, 20] and step.context_lens.tolist()[:2] == [9, 19]
    assert step.row_drafts.tolist()[:2] == [1, 0] and step.samples.tolist()[:2] == [1, 1]
    assert step.last_token_indices.tolist()[:2] == [0, 4]


@pytest.mark.parametrize("limit", [0, 9, 10])
def test_a_row_whose_request_has_ended_looks_like_padding(limit: int) -> None:
    """By a stop token (0) or by its limit, at or below what is known; its neighbours go on."""
    rows = [Row(0, 9, 4, 10, 3), Row(1, 9, 4, 10, 3, ended=True), Row(3, 19, 4, 20, 0)]
    state, buffers = random_state(random.Random(5), rows), poisoned_buffers()
    state.tensors.token_limit[1] = limit
    buffers.load_rows(planned(rows))
    buffers.fill(state.tensors, BLOCK)
    step, sink = buffers.step, state.tensors.sink
    live = [1] * 4 + [0] * 4 + [1, 0, 0, 0]
    assert (step.slot_mapping >= 0).long().tolist()[:12] == live
    assert not step.input_ids[4:8].any() and not step.positions[4:8].any()
    assert step.row_slots.tolist() == [0, sink, 3, sink, sink]
    assert step.samples.tolist()[:3] == [1, 0, 1] and step.row_drafts.tolist()[:3] == [3, 0, 0]
    assert step.seq_lens.tolist()[:3] == [13, 0, 20]
    assert step.context_lens.tolist()[:3] == [9, 0, 19]
    assert step.last_token_indices.tolist()[:3] == [0, 0, 8]


def test_one_token_below_its_limit_a_request_goes_on() -> None:
    rows = [Row(1, 9, 4, 10)]
    state, buffers = random_state(random.Random(5), rows), poisoned_buffers()
    state.tensors.token_limit[1] = 11
    buffers.load_rows(planned(rows))
    buffers.fill(state.tensors, BLOCK)
    assert buffers.step.row_slots[0] == 1 and buffers.step.samples[0] == 1


def test_padding_is_named_for_every_buffer() -> None:
    """The sanitizer checks what this table has: a new buffer must enter it."""
    assert set(PADDING) | {"row_slots"} == {f.name for f in fields(StepTensors)}
    buffers = poisoned_buffers()
    buffers.load_rows([])
    buffers.fill(random_state(random.Random(4), []).tensors, BLOCK)
    for name, harmless in PADDING.items():
        buffer = getattr(buffers.step, name)
        assert buffer.shape[0] == (MAX_TOKENS if name in TOKEN_BUFFERS else SLOTS)
        assert bool((buffer == harmless).all()), name


def test_padded_views_reach_past_the_live_rows() -> None:
    rows = [Row(2, 9, 4, 10, 2)]
    buffers = poisoned_buffers()
    batch = buffers.load_rows(planned(rows), num_reqs_padded=3, num_tokens_padded=12)
    buffers.fill(random_state(random.Random(6), rows).tensors, BLOCK)
    assert (batch.num_reqs, batch.num_tokens) == (1, 4)
    for view in (batch.input_ids, batch.positions, batch.slot_mapping):
        assert view.shape[0] == 12
    assert batch.row_drafts.tolist() == [2, 0, 0]
    assert batch.step.samples[:3].tolist() == [1, 0, 0]
    assert batch.last_token_indices.shape[0] == batch.row_slots.shape[0] == 3
    alone = batch.without_padded_rows()
    assert (alone.num_reqs_padded, alone.num_tokens_padded) == (1, 12)


def test_nothing_of_a_large_step_remains_after_a_small_one() -> None:
    rng = random.Random(0)
    large = [Row(slot, 3, 6, 7, 2) for slot in range(SLOTS)]
    small = [Row(2, 9, 1, 10)]
    buffers = InputBuffers(SLOTS, MAX_TOKENS, CPU)
    for rows in (large, small):
        state = random_state(rng, rows)
        buffers.load_rows(planned(rows))
        buffers.fill(state.tensors, BLOCK)
        check_extents(buffers, state.tensors, rows)


def test_rows_that_stay_as_they_are_need_no_copy_and_others_do() -> None:
    """Whoever else writes the rows says so."""
    buffers = poisoned_buffers()
    copied: list[str] = []
    copy_in = buffers._copy_in

    def spy(target: torch.Tensor, host: np.ndarray) -> None:
        copied.append("starts" if target is buffers.rows.query_start_loc else "slots")
        copy_in(target, host)

    buffers._copy_in = spy  # type: ignore[method-assign]
    several = [Row(1, 9, 1, 10), Row(3, 4, 1, 5)]
    grown = [Row(1, 10, 1, 11), Row(3, 5, 1, 6)]  # a step later
    moved = [Row(1, 10, 1, 11), Row(2, 5, 1, 6)]
    wider = [Row(1, 10, 2, 12), Row(2, 5, 1, 6)]
    for rows, expected in ((several, 2), (grown, 0), (moved, 2), (wider, 2), (wider, 0)):
        copied.clear()
        buffers.load_rows(planned(rows))
        assert len(copied) == expected
        state = random_state(random.Random(1), rows)
        buffers.fill(state.tensors, BLOCK)
        check_extents(buffers, state.tensors, rows)
    poison(buffers.rows)
    buffers.forget_rows()
    state = random_state(random.Random(1), wider)
    buffers.load_rows(planned(wider))
    buffers.fill(state.tensors, BLOCK)
    check_extents(buffers, state.tensors, wider)


def test_rows_with_the_key_of_those_in_the_buffers_are_not_compared() -> None:
    """Of those that were loaded last, by anyone."""
    buffers, key = poisoned_buffers(), object()
    first, later = planned([Row(1, 9, 1, 10)]), planned([Row(1, 10, 1, 11)])
    buffers.load_rows(first, key=key)
    poison(buffers.rows)
    batch = buffers.load_rows(later, key=key)
    assert batch.plan_rows is later and batch.num_tokens == 1
    assert buffers.rows.idx_mapping[0] != 1, "nothing is copied"
    for come_between in (lambda: buffers.load_rows([]), buffers.forget_rows):
        buffers.load_rows(first, key=key)
        come_between()
        buffers.load_rows(later, key=key)
        assert buffers.rows.idx_mapping.tolist()[:2] == [1, -1]
        assert buffers.rows.query_start_loc.tolist()[:3] == [0, 1, 1]


def test_a_copy_of_rows_that_failed_is_not_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, first, second = poisoned_buffers(), [Row(1, 9, 1, 10)], [Row(2, 9, 2, 11)]
    buffers.load_rows(planned(first))
    copy_in = buffers._copy_in

    def fails(target: torch.Tensor, host: np.ndarray) -> None:
        if target is buffers.rows.query_start_loc:
            raise KeyboardInterrupt
        copy_in(target, host)

    with monkeypatch.context() as patch:
        patch.setattr(buffers, "_copy_in", fails)
        with pytest.raises(KeyboardInterrupt):
            buffers.load_rows(planned(second))
    buffers.load_rows(planned(first))
    assert buffers.rows.idx_mapping.tolist()[:2] == [1, -1]
    assert buffers.rows.query_start_loc.tolist()[:3] == [0, 1, 1]


def test_buffers_keep_their_addresses() -> None:
    buffers = InputBuffers(SLOTS, MAX_TOKENS, CPU)
    tensors = [getattr(g, f.name) for g in (buffers.rows, buffers.step) for f in fields(g)]
    before = [t.data_ptr() for t in tensors]
    rows = [Row(1, 0, 5, 5)]
    buffers.load_rows(planned(rows))
    buffers.fill(random_state(random.Random(1), rows).tensors, BLOCK)
    assert [t.data_ptr() for t in tensors] == before


def test_too_many_tokens_are_refused() -> None:
    buffers = InputBuffers(SLOTS, 4, CPU)
    with pytest.raises(AssertionError):
        buffers.load_rows(planned([Row(0, 0, 5, 5)]))


# ---- phase U ----


SAMPLED = range(5000, 5012)  # few: stop ids are among them


def random_verdict(rng: random.Random, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step may yield; where nobody may look, stop ids or garbage."""
    shape = (SLOTS, NUM_DRAFTS + 1)
    sampled = torch.full(shape, 10**9) if rng.random() < 0.5 else torch.full(shape, SAMPLED[0])
    counts = [0] * SLOTS
    for index, row in enumerate(rows):
        if row.samples:
            counts[index] = rng.randint(1, row.num_verified + 1)
            for place in range(counts[index]):
                sampled[index, place] = rng.choice(SAMPLED)
    return sampled, torch.tensor(counts)


@SETTINGS
@given(st.integers(0, 2**32))
def test_commit_equals_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng)
    state, buffers = random_state(rng, rows), poisoned_buffers()
    slots = state.tensors
    buffers.load_rows(planned(rows))
    buffers.fill(slots, BLOCK)
    sampled, counts = random_verdict(rng, rows)
    stops = random_stops(rng, SAMPLED)
    then, listed = Snapshot.of(slots), Snapshot.of(stops)
    step = {f.name: getattr(buffers.step, f.name).clone() for f in fields(buffers.step)}
    commit_tokens(slots, stops, buffers.rows, buffers.step, sampled, counts)
    assert Snapshot.of(stops) == listed
    for index, row in enumerate(rows):
        slot = row.slot
        if row.ended:  # nothing of it changes any more
            continue
        ids = listed.stop_ids[slot][: listed.stop_counts[slot]]
        for place in range(int(counts[index])):
            token = int(sampled[index, place])
            then.token_ids[slot][then.num_tokens[slot]] = token
            then.num_tokens[slot] += 1
            num_output = then.num_tokens[slot] - then.num_prompt_tokens[slot]
            if token in ids and num_output > listed.min_tokens[slot]:
                then.token_limit[slot] = 0
        if row.samples:
            then.num_computed[slot] = then.num_tokens[slot] - 1
        else:
            then.num_computed[slot] += row.num_tokens
        then.num_drafts[slot] = 0
    then.check(slots)  # the sink's counters stay 0 too
    for name, value in step.items():  # phase U only reads the step
        assert torch.equal(getattr(buffers.step, name), value), name


def commit_one(
    rows: list[Row], tokens: list[int], stops: StopTensors | None = None, num_prompt: int = 1
) -> SlotTensors:
    """The slots after a step whose first row yields `tokens`."""
    state, buffers = random_state(random.Random(2), rows), poisoned_buffers()
    buffers.load_rows(planned(rows))
    buffers.fill(state.tensors, BLOCK)
    sampled = torch.full((SLOTS, NUM_DRAFTS + 1), 10**9)
    sampled[0, : len(tokens)] = torch.tensor(tokens)
    counts = torch.tensor([len(tokens)] + [0] * (SLOTS - 1))
    state.tensors.num_prompt_tokens[rows[0].slot] = num_prompt
    stops = no_stops() if stops is None else stops
    commit_tokens(state.tensors, stops, buffers.rows, buffers.step, sampled, counts)
    return state.tensors


def test_last_token_of_a_full_history_is_written_at_its_end() -> None:
    slots = commit_one([Row(0, MAX_LEN - 2, 1, MAX_LEN - 1)], [4321])
    assert slots.token_ids[0, -1] == 4321
    assert slots.num_tokens[0] == MAX_LEN


def test_last_draft_and_the_token_behind_it_fill_the_history() -> None:
    known = MAX_LEN - 1 - NUM_DRAFTS
    rows = [Row(0, known - 1, NUM_DRAFTS + 1, known, NUM_DRAFTS)]
    slots = commit_one(rows, [11, 12, 13, 14])
    assert slots.token_ids[0, known:].tolist() == [11, 12, 13, 14]
    assert (slots.num_tokens[0], slots.num_computed[0], slots.num_drafts[0]) == (
        MAX_LEN,
        MAX_LEN - 1,
        0,
    )


def test_rejected_drafts_are_not_counted_as_computed() -> None:
    slots = commit_one([Row(0, 9, 4, 10, 3)], [51])
    assert (slots.num_tokens[0], slots.num_computed[0], slots.num_drafts[0]) == (11, 10, 0)
    assert slots.token_ids[0, 10] == 51


def one_stop(
    slot: int, ids: list[int], min_tokens: int = 0, count: int | None = None
) -> StopTensors:
    stops = no_stops()
    stops.min_tokens[slot] = min_tokens
    stops.stop_counts[slot] = len(ids) if count is None else count
    stops.stop_ids[slot, : len(ids)] = torch.tensor(ids)
    return stops


RUN = [51, 52, 53, 54]


@pytest.mark.parametrize("place", range(4))
def test_a_stop_token_ends_its_request_wherever_it_stands_in_a_run(place: int) -> None:
    rows = [Row(2, 9, 4, 10, 3), Row(0, 9, 4, 10, 3)]
    slots = commit_one(rows, RUN, one_stop(2, [7, RUN[place], 9]))
    assert slots.token_limit[2] == 0 and slots.token_limit[0] > 10
    # The run is taken whole: the host drops what stands behind the stop.
    assert (slots.num_tokens[2], slots.num_computed[2]) == (14, 13)
    assert slots.token_ids[2, 10:14].tolist() == RUN


@pytest.mark.parametrize("num_taken", range(1, 5))
def test_a_stop_token_that_is_not_taken_ends_nothing(num_taken: int) -> None:
    """The next place holds it, and is no part of the run."""
    stops = one_stop(2, [10**9, *RUN[num_taken:]][:4])
    slots = commit_one([Row(2, 9, 4, 10, 3)], RUN[:num_taken], stops)
    assert slots.token_limit[2] > 10


@pytest.mark.parametrize("min_tokens", range(6))
def test_a_stop_token_counts_behind_min_tokens(min_tokens: int) -> None:
    """Two tokens of the answer are known; the third of the run is the fifth."""
    stops = one_stop(2, [RUN[2]], min_tokens)
    slots = commit_one([Row(2, 9, 4, 10, 3)], RUN, stops, num_prompt=8)
    assert (slots.token_limit[2] == 0) == (min_tokens < 5)


def test_stop_ids_of_a_former_holder_and_of_neighbours_end_nothing() -> None:
    stops = one_stop(2, [7, 8, 51], count=2)
    stops.stop_counts[[0, 1, 3, 4, 5]] = 4
    stops.stop_ids[[0, 1, 3, 4, 5]] = torch.tensor(RUN)
    slots = commit_one([Row(2, 9, 4, 10, 3), Row(0, 9, 4, 10, 3)], RUN, stops)
    assert slots.token_limit[2] > 10 and slots.token_limit[0] > 10


def test_a_chunk_ends_nothing() -> None:
    stops = one_stop(2, [0, 10**9])
    slots = commit_one([Row(2, 3, 4, 10)], [], stops)
    assert slots.token_limit[2] > 10 and slots.num_computed[2] == 7


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
    buffers.fill(state.tensors, BLOCK)
    cache = torch.zeros(2, SLOTS * MAX_BLOCKS + 1, BLOCK, 1, 1)
    ones = torch.ones(MAX_TOKENS, 1, 1)
    store_kv(ones, ones, cache, buffers.step.slot_mapping)
    assert not cache[:, 0].any(), "the null block was written"
    assert int(cache[0].sum()) == int(cache[1].sum()) == sum(r.num_live for r in rows)
