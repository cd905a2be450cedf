"""Drafting against torch, over random slot state and poisoned buffers."""

import itertools
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stoop.ops import drafting as reference
from stoop.ops.drafting import PrefillTensors
from stoop.ops.inputs import RowTensors, StepTensors
from stoop.ops.sampling import DrawTensors
from support.kernel_compiling import compile_launches
from support.step_cases import (
    BLOCK,
    POISON,
    SEEDS,
    Case,
    check_compiled,
    check_equal,
    check_slots,
    engine_case,
    make_case,
    verified_case,
)

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
# The interpreter's: an old way to call numpy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def poisoned_prefill(case: Case) -> PrefillTensors:
    return PrefillTensors(
        token_ids=torch.full((case.max_tokens,), POISON, dtype=torch.int32),
        last_token_indices=torch.full((case.max_reqs,), POISON),
        room=torch.full((case.max_reqs,), POISON),
    )


def poisoned_decode(case: Case) -> tuple[RowTensors, StepTensors]:
    """Buffers of draft decodes: their own, but for what they share with the target's."""

    def full(dtype: torch.dtype = torch.int64, more: int = 0) -> Tensor:
        return torch.full((case.max_reqs + more,), POISON, dtype=dtype)

    step = replace(
        case.step,
        input_ids=full(torch.int32),
        positions=full(),
        slot_mapping=full(),
        context_lens=full(torch.int32),
        seq_lens=full(torch.int32),
    )
    return RowTensors(case.rows.idx_mapping, full(torch.int32, 1)), step


def drafting_case(rng: random.Random) -> tuple[Case, Tensor]:
    """Room of every row, and drafts that stand there already, fewer or as many."""
    case = verified_case(rng)
    room = reference.draft_room(case.slots, case.step, case.max_len)
    for row in range(case.num_live):
        slot = int(case.rows.idx_mapping[row])
        case.slots.num_drafts[slot] = rng.randint(0, int(room[row]))
    return case, room


@pytest.mark.interpreted
@SEEDS
def test_draft_prefill_equals_torch(seed: int) -> None:
    from stoop.ops.kernels import drafting as kernels

    rng = random.Random(seed)
    case = verified_case(rng)
    slots, rows, step = case.slots, case.rows, case.step
    if seed % 2:  # the first row has failed, without a token
        slots.num_computed[step.row_slots[0]] = step.context_lens[0]
    before, limit = case.copy(), rng.randint(1, case.max_len)
    ours, theirs = poisoned_prefill(case), poisoned_prefill(case)
    kernels.prepare_draft_prefill(slots, rows, step, ours, limit)
    reference.prepare_draft_prefill(slots, rows, step, theirs, limit)
    check_equal(ours, theirs)
    assert int(ours.last_token_indices.min()) >= 0
    expected = reference.draft_room(slots, step, limit)
    assert torch.equal(ours.room, expected)
    assert torch.equal(kernels.draft_room(slots, step, limit), expected)
    for group in ("slots", "rows", "step"):
        check_equal(getattr(case, group), getattr(before, group))


@pytest.mark.interpreted
@SEEDS
def test_draft_decode_equals_torch(seed: int) -> None:
    from stoop.ops.kernels import drafting as kernels

    case, room = drafting_case(random.Random(seed))
    before = case.copy()
    results = []
    for module in (kernels, reference):
        rows, step = poisoned_decode(case)
        module.prepare_draft_decode(
            case.slots, rows, case.step, room, BLOCK, rows.query_start_loc, step
        )
        results.append((rows, step))
    (our_rows, ours), (their_rows, theirs) = results
    check_equal(ours, theirs)
    check_equal(our_rows, their_rows)
    for group in ("slots", "rows", "step"):
        check_equal(getattr(case, group), getattr(before, group))


@pytest.mark.interpreted
@SEEDS
def test_draft_commit_equals_torch(seed: int) -> None:
    from stoop.ops.kernels import drafting as kernels

    rng = random.Random(seed)
    ours, room = drafting_case(rng)
    theirs, before = ours.copy(), ours.copy()
    count = rng.randint(max(ours.num_live, 1), ours.max_reqs)  # a graph's extent
    d2t = torch.randint(0, 1000, (3000,)) if rng.random() < 0.5 else None
    for _ in range(2):
        drafts = torch.randint(2000, 3000, (count,))
        mine = kernels.commit_draft(ours.slots, ours.step, room, drafts, d2t)
        other = reference.commit_draft(theirs.slots, theirs.step, room, drafts, d2t)
        assert mine.dtype == other.dtype and torch.equal(mine, other)
    check_slots(ours, theirs, before)
    check_equal(ours.step, before.step)


@pytest.mark.interpreted
@SEEDS
def test_draft_draw_equals_torch(seed: int) -> None:
    from stoop.ops.kernels import coupling as kernels

    rng = random.Random(seed)
    case, _ = drafting_case(rng)
    count = rng.randint(max(case.num_live, 1), case.max_reqs)
    num_slots = case.slots.num_tokens.shape[0]

    def each(*values: float) -> Tensor:
        return torch.tensor([rng.choice(values) for _ in range(num_slots)])

    seeds = torch.tensor([rng.getrandbits(63) for _ in range(num_slots)])
    limits = (each(0.0, 0.1), each(0, 1, 5).long(), each(1.0, 0.5))
    how = DrawTensors(each(0.0, 0.6, 1.0), seeds, *limits)
    size = (7, 300, 4097)[seed % 3]  # the last one has more than one part
    d2t = torch.tensor(sorted(rng.sample(range(2 * size), size))) - torch.arange(size)
    logits = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    ways = list(itertools.product((None, d2t), (False, True)))
    for offsets, filters in ways if EVERY else ways[seed % 4 :][:1]:  # each meets every size
        given = (case.slots, case.step, how, offsets, filters)
        found = kernels.draw_as_target(logits.clone(), *given)
        wanted = reference.draw_as_target(logits.clone(), *given)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.interpreted
@SEEDS
def test_lookup_equals_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoop.ops.kernels import drafting as kernels

    rng = random.Random(seed)
    monkeypatch.setattr(kernels, "HISTORY_BLOCK", rng.choice((4, 8, 16, 2048)))
    ours, _ = drafting_case(rng)
    few = rng.choice((1, 2, 3, 4, 9))  # tokens: they repeat
    ours.slots.token_ids.copy_(torch.randint(1, few + 1, ours.slots.token_ids.shape))
    theirs, before = ours.copy(), ours.copy()
    least = rng.randint(1, 4)
    sizes = (least, rng.randint(least, 6))
    room = reference.draft_room(ours.slots, ours.step, ours.max_len)
    kernels.look_up_ngrams(ours.slots, ours.step, room, sizes, ours.num_drafts)
    reference.look_up_ngrams(theirs.slots, theirs.step, room, sizes, ours.num_drafts)
    check_slots(ours, theirs, before)
    check_equal(ours.step, before.step)


@pytest.mark.interpreted
@pytest.mark.parametrize("block", [4, 8, 2048])
@pytest.mark.parametrize(
    ("text", "sizes", "drafts"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], (1, 4), [9, 8, 7]),
        ([5, 2, 6, 1, 2, 7, 1, 2], (1, 4), [7, 1, 2]),  # two tokens outweigh an earlier one
        ([2, 6, 8, 2, 7, 8, 2], (1, 1), [6, 8, 2]),  # of equals the first
        ([1, 5, 2, 3, 1, 6, 2, 3, 1, 7, 4, 4, 1], (1, 1), [5, 2, 3]),  # a block apart, too
        ([1, 2, 3, 1], (2, 4), []),  # one token repeats, two are asked for
        ([4, 4], (1, 4), [4]),  # no more than is known
        ([4], (1, 4), []),
    ],
)
def test_lookup_of_small_texts(
    text: list[int], sizes: tuple[int, int], drafts: list[int], block: int, monkeypatch: Any
) -> None:
    from stoop.ops.kernels import drafting as kernels

    monkeypatch.setattr(kernels, "HISTORY_BLOCK", block)
    case, known = make_case(2, 8, 23), len(text)
    case.slots.token_ids[1].fill_(text[0])  # what stands behind the text is not text
    case.slots.token_ids[1, :known] = torch.tensor(text)
    case.slots.num_tokens[1] = known
    case.step.row_slots.copy_(torch.tensor([1, case.slots.sink]))
    kernels.look_up_ngrams(case.slots, case.step, torch.tensor([3, 0]), sizes, 3)
    count = int(case.slots.num_drafts[1])
    assert case.slots.token_ids[1, known : known + count].tolist() == drafts


@pytest.mark.interpreted
def test_padding_drafts_nothing() -> None:
    """Whatever its room is said to be, and whatever the sink holds."""
    from stoop.ops.kernels import drafting as kernels

    case = make_case(5, 40, 23)
    case.step.row_slots.fill_(case.slots.sink)
    for tensor in (case.slots.token_ids, case.slots.num_tokens, case.slots.num_drafts):
        tensor[-1] = 2
    before, room = case.copy(), torch.full((5,), 3)
    number = kernels.commit_draft(case.slots, case.step, room, torch.full((5,), 9))
    assert number.tolist() == [-1] * 5
    kernels.look_up_ngrams(case.slots, case.step, room, (1, 2), case.num_drafts)
    check_equal(case.slots, before.slots)


@pytest.mark.parametrize("num_drafts", [1, 3, 8, 16])
def test_drafting_compiles_for_an_h200(num_drafts: int) -> None:
    from stoop.ops.kernels import coupling
    from stoop.ops.kernels import drafting as kernels

    case = engine_case(num_drafts)
    slots, step, room = case.slots, case.step, torch.zeros(case.max_reqs, dtype=torch.int64)
    rows, out = poisoned_decode(case)
    with compile_launches() as found:
        kernels.draft_room(slots, step, 4096)
        kernels.prepare_draft_prefill(slots, case.rows, step, poisoned_prefill(case), 4096)
        kernels.prepare_draft_decode(slots, rows, step, room, 16, rows.query_start_loc, out)
        for d2t in (None, room.clone()):
            kernels.commit_draft(slots, step, room, room.clone(), d2t)
        kernels.look_up_ngrams(slots, step, room, (3, 5), num_drafts)
        logits, floats = torch.zeros(4, 12288), torch.zeros(8)
        how = DrawTensors(floats, room, floats, room, floats)
        for d2t in (None, torch.zeros(12288, dtype=torch.int64)):
            for filters in (False, True):
                coupling.draw_as_target(logits, slots, step, how, d2t, filters)
    check_compiled(found, 6 + 2 * (2 + 2 + 5))
