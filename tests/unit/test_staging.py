"""Host edits of device state: together, in order, inside their rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoop.batch.request_state import RequestState
from stoop.batch.staging import StagedWrites
from stoop.core.step import BlockAppend

CPU = torch.device("cpu")


def test_nothing_changes_before_apply_and_everything_at_it() -> None:
    staged, a, b = StagedWrites(CPU), torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    staged.put(a, 1, [1.5, 2.5], start=1)
    staged.put(b, 2, 7)
    assert not a.any() and not b.any()
    staged.apply()
    assert a.tolist() == [[0] * 4, [0, 1.5, 2.5, 0], [0] * 4]
    assert b.tolist() == [0, 0, 7]


def test_last_edit_of_a_place_wins() -> None:
    staged, a = StagedWrites(CPU), torch.zeros(2, 4, dtype=torch.int32)
    staged.put(a, 0, [1, 2, 3, 4])
    staged.put(a, 0, [9, 9], start=1)
    staged.put(a, 0, [7], start=2)
    staged.apply()
    assert a.tolist() == [[1, 9, 7, 4], [0] * 4]


def test_apply_forgets_its_edits() -> None:
    staged, a = StagedWrites(CPU), torch.zeros(2, dtype=torch.int64)
    staged.put(a, 0, 5)
    staged.apply()
    a.zero_()
    staged.apply()
    assert a.tolist() == [0, 0]


@pytest.mark.parametrize(("values", "start"), [([1, 2, 3], 2), ([1] * 5, 0), ([1], 4)])
def test_overrun_raises_and_stages_nothing(values: list[int], start: int) -> None:
    staged, a = StagedWrites(CPU), torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(IndexError, match="overrun a row of 4"):
        staged.put(a, 0, values, start)
    staged.apply()
    assert not a.any()


def test_overrun_of_a_scalar_row_raises() -> None:
    with pytest.raises(IndexError):
        StagedWrites(CPU).put(torch.zeros(3), 0, [1.0, 2.0])


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_that_does_not_exist_raises(row: int) -> None:
    with pytest.raises((AssertionError, IndexError)):
        StagedWrites(CPU).put(torch.zeros(3, 4), row, [1.0])


def test_deep_rows_are_flat_within_the_row() -> None:
    staged, a = StagedWrites(CPU), torch.zeros(2, 2, 3, dtype=torch.int64)
    staged.put(a, 1, [1, 2, 3, 4, 5, 6])
    staged.apply()
    assert a[1].tolist() == [[1, 2, 3], [4, 5, 6]] and not a[0].any()


def test_empty_values_write_nothing_and_spoil_no_others() -> None:
    staged, a = StagedWrites(CPU), torch.zeros(2, 4, dtype=torch.int64)
    staged.put(a, 0, [])
    staged.put(a, 1, [2**40 + 1])
    staged.put(a, 0, [], start=4)
    staged.apply()
    assert a.tolist() == [[0] * 4, [2**40 + 1, 0, 0, 0]]


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 2**53 + 1, -1])
def test_all_bits_of_a_seed_arrive(seed: int) -> None:
    staged, seeds = StagedWrites(CPU), torch.zeros(2, dtype=torch.int64)
    staged.put(seeds, 1, seed)
    staged.put(seeds, 0, 3)
    staged.apply()
    assert seeds.tolist() == [3, seed]


def test_block_append_past_the_row_raises() -> None:
    state = RequestState(num_slots=2, max_model_len=10, block_size=4, device=CPU)
    assert state.max_blocks == 3
    staged = StagedWrites(CPU)
    state.append_blocks(staged, BlockAppend(0, 1, [5, 6]))
    with pytest.raises(IndexError):
        state.append_blocks(staged, BlockAppend(0, 2, [7, 8]))
    staged.apply()
    assert state.tensors.block_table.tolist() == [[0, 5, 6], [0] * 3, [0] * 3]


EDITS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 2),
        st.integers(0, 4),
        st.lists(st.integers(-(2**40), 2**40), max_size=5),
    ),
    max_size=20,
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(EDITS)
def test_same_as_writing_one_by_one(edits: list[tuple[int, int, int, list[int]]]) -> None:
    staged = StagedWrites(CPU)
    real = [torch.zeros(3, 5, dtype=torch.int64) for _ in range(2)]
    twin = [np.zeros((3, 5), dtype=np.int64) for _ in range(2)]
    for which, row, start, values in edits:
        if start + len(values) > 5:
            with pytest.raises(IndexError):
                staged.put(real[which], row, values, start)
            continue
        staged.put(real[which], row, values, start)
        twin[which][row, start : start + len(values)] = values
    staged.apply()
    for tensor, expected in zip(real, twin, strict=True):
        assert tensor.tolist() == expected.tolist()
