"""The native attention backend: right against dense attention, and row by row the same."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from stoop.attention.traits import NATIVE
from stoop.ops.native import calls
from stoop.ops.native.calls import BatchRows, native_attend
from support.attention_cases import NAN, Case, Heads, Row, attend_densely, make_case

pytestmark = pytest.mark.usefixtures("native")

MIXED = [Row(0, 1), Row(5, 1), Row(62, 1), Row(63, 1), Row(64, 1), Row(127, 3), Row(0, 40)]
assert NATIVE.head_sizes is not None


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def attend(case: Case, window: int = 0) -> Tensor:
    """What the kernel does not write stays NaN."""
    rows = BatchRows(
        case.query_start_loc, case.context_lens, case.seq_lens, case.row_slots, case.block_table
    )
    out = torch.full(case.q.shape, NAN)
    native_attend(case.q, case.cache, list(rows), case.q.shape[2] ** -0.5, window, out)
    return out


def assert_right(case: Case, window: int = 0, atol: float = 2e-6) -> Tensor:
    ours, dense = attend(case, window), attend_densely(case, window)
    begin = 0
    for row in case.rows:
        live = slice(begin, begin + row.query_len - row.dead)
        torch.testing.assert_close(ours[live], dense[live], rtol=2e-5, atol=atol)
        assert not ours[live.stop : begin + row.query_len].any()  # dead tokens: zeros
        begin += row.query_len
    assert not ours[begin:].any()  # padding: zeros
    return ours


@pytest.mark.parametrize("size", NATIVE.head_sizes)
@pytest.mark.parametrize("group", [1, 3])
def test_head_sizes_and_groups(size: int, group: int) -> None:
    assert_right(make_case(MIXED, Heads(2, group, size)))


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    assert_right(
        make_case(
            [Row(c, q) for c in (0, 7, 62, 63, 64) for q in (1, 2, 17)], block_size=block_size
        )
    )


@pytest.mark.parametrize("window", [1, 2, 24, 63, 64, 65, 100, 1000])
def test_windows(window: int) -> None:
    rows = [Row(0, 1), Row(23, 1), Row(24, 2), Row(64, 1), Row(130, 1), Row(0, 70), Row(90, 33)]
    assert_right(make_case(rows), window)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_lengths_around_blocks(length: int) -> None:
    rows = [Row(0, length), Row(length, 1), Row(length - 1, 1), Row(length, 4), Row(length, 20)]
    assert_right(make_case(rows, block_size=16))


@pytest.mark.parametrize("window", [0, 24])
def test_dead_tokens_and_padding(window: int) -> None:
    rows = [Row(10, 4, dead=1), Row(0, 4, dead=3), Row(63, 4, dead=2), Row(64, 20, dead=18)]
    assert_right(make_case(rows, padded_rows=3, padded_tokens=7), window)
    assert_right(make_case([Row(5, 3)], padded_tokens=200), window)


def test_dead_queries_that_are_nan() -> None:
    """A dead token's query comes from nowhere: its output must be finite all the same."""
    case = make_case([Row(10, 4, dead=2)])
    case.q[2:] = NAN
    assert_right(case)


def test_nothing_live() -> None:
    case = make_case([Row(3, 1)], padded_tokens=2)
    case = dataclasses.replace(
        case,
        rows=[],
        query_start_loc=torch.zeros(2, dtype=torch.int32),
        seq_lens=torch.zeros(1, dtype=torch.int32),
    )
    assert not attend(case).any()


def test_a_query_depends_on_its_row_alone() -> None:
    """To the bit: the same in a batch, alone, in chunks of any size, with drafts after it."""
    heads = Heads(2, 3, 16)
    whole = make_case([Row(0, 150), Row(70, 5), *[Row(9, 1)] * 30], heads)
    together = attend(whole)

    def part(first: int, count: int, row: int = 0) -> Tensor:
        start = int(whole.query_start_loc[row])
        given = int(whole.context_lens[row]) + first
        one = dataclasses.replace(
            whole,
            q=whole.q[start + first : start + first + count],
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([given], dtype=torch.int32),
            seq_lens=torch.tensor([given + count], dtype=torch.int32),
            row_slots=whole.row_slots[row : row + 1],
        )
        return attend(one)

    for chunk in (1, 2, 7, 16, 64, 150):
        for first in range(0, 150, chunk):
            count = min(chunk, 150 - first)
            assert torch.equal(part(first, count), together[first : first + count])
    for first in range(5):
        assert torch.equal(part(first, 1, row=1), together[150 + first : 151 + first])


@pytest.mark.parametrize("window", [0, 24])
def test_every_number_of_threads(window: int) -> None:
    case = make_case([Row(0, 150), Row(70, 5), *[Row(n, 1) for n in range(1, 90, 3)]])
    outputs = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        outputs.append(attend(case, window))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_large_scores_and_equal_ones() -> None:
    """Scores far apart, where most weights vanish; and scores that are all the same."""
    case = make_case([Row(200, 1), Row(0, 70)])
    case.q.mul_(50)
    assert_right(case, atol=1e-4)  # the rounding of a score of hundreds
    case.q.zero_()
    assert_right(case)


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
def test_a_key_that_is_not_finite_spoils_its_row_only(value: float) -> None:
    case = make_case([Row(70, 1), Row(70, 1)])
    clean = attend(case)
    slot = int(case.row_slots[0])
    case.cache[0, int(case.block_table[slot, 0]), 3] = value
    ours = attend(case)
    assert bool(ours[0].isnan().all())
    assert torch.equal(ours[1], clean[1])


def test_queries_that_are_not_contiguous() -> None:
    case = make_case(MIXED)
    assert not case.q.is_contiguous()
    assert torch.equal(attend(dataclasses.replace(case, q=case.q.contiguous())), attend(case))


# ---- mutants: a window that is off by one, a key past the end, a block of another row ----


def _wider(case: Case) -> dict[str, Any]:
    return {"window": 25}


def _narrower(case: Case) -> dict[str, Any]:
    return {"window": 23}


def _past_the_end(case: Case) -> dict[str, Any]:
    return {"seq_lens": case.seq_lens + 1, "context_lens": case.context_lens + 1}


def _one_key_short(case: Case) -> dict[str, Any]:
    return {"seq_lens": case.seq_lens - 1, "context_lens": case.context_lens - 1}


def _slot_of_another(case: Case) -> dict[str, Any]:
    return {"row_slots": case.row_slots.flip(0)}


@pytest.mark.parametrize(
    "mutant", [_wider, _narrower, _past_the_end, _one_key_short, _slot_of_another]
)
def test_mutants_are_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([Row(70, 1), Row(70, 1)])
    assert_right(case, window=24)
    changes = mutant(case)
    window = changes.pop("window", 24)
    changed = attend(dataclasses.replace(case, **changes), window)
    expected = attend_densely(case, 24)
    assert not torch.allclose(changed, expected, rtol=2e-5, atol=2e-6, equal_nan=True)


def test_a_call_names_what_it_writes() -> None:
    """The tape and the sanitizer go by the schema."""
    for operation, written in (
        (torch.ops.stoop.native_attend.default, {"out"}),
        (torch.ops.stoop.packed_product.default, {"out"}),
        (torch.ops.stoop.packed_rows.default, {"out"}),
        (torch.ops.stoop.native_layers.default, {"stream", "caches", "out"}),
    ):
        arguments = operation._schema.arguments
        found = {each.name for each in arguments if each.alias_info and each.alias_info.is_write}
        assert found == written, operation
    assert calls.TILE == 16
