"""Inputs and commits against torch, over random slot state and poisoned buffers."""

import random
from dataclasses import replace

import pytest
import torch

from stoop.ops import inputs as reference
from stoop.ops.inputs import (
    PADDING,
)
from support.kernel_compiling import compile_launches
from support.step_cases import (
    BLOCK,
    SEEDS,
    check_compiled,
    check_equal,
    check_slots,
    engine_case,
    make_case,
    prepared_case,
    random_case,
    random_verdict,
)

# ---- under the interpreter ----


@pytest.mark.interpreted
@SEEDS
def test_inputs_equal_torch(seed: int) -> None:
    from stoop.ops.kernels import inputs as kernels

    ours = random_case(random.Random(seed))
    theirs = ours.copy()
    reference.prepare_inputs(theirs.slots, theirs.rows, theirs.step, BLOCK)
    kernels.prepare_inputs(ours.slots, ours.rows, ours.step, BLOCK)
    check_equal(ours.step, theirs.step)
    check_equal(ours.slots, theirs.slots)
    check_equal(ours.rows, theirs.rows)


@pytest.mark.interpreted
def test_padding_alone_is_harmless() -> None:
    from stoop.ops.kernels import inputs as kernels

    case = make_case(5, 40, 23)
    case.slots.token_ids.fill_(5)
    before = case.copy()
    kernels.prepare_inputs(case.slots, case.rows, case.step, BLOCK)
    for name, harmless in PADDING.items():
        if name != "block_rows":
            assert bool((getattr(case.step, name) == harmless).all()), name
    assert bool((case.step.row_slots == case.slots.sink).all())
    sampled = torch.full((5, 4), 9)
    # Not even a count that should not be there reaches the sink.
    case.stops.stop_counts.fill_(1)  # nor does a stop
    case.stops.stop_ids.fill_(9)
    case.slots.token_limit.fill_(23)
    before.slots.token_limit.fill_(23)
    counts = torch.full((5,), 2)
    kernels.commit_tokens(case.slots, case.stops, case.rows, case.step, sampled, counts)
    check_equal(case.slots, before.slots)


@pytest.mark.interpreted
@SEEDS
def test_commit_equals_torch(seed: int) -> None:
    from stoop.ops.kernels import inputs as kernels

    rng = random.Random(seed)
    ours = prepared_case(rng)
    theirs, before = ours.copy(), ours.copy()
    sampled, counts = random_verdict(rng, ours)
    reference.commit_tokens(theirs.slots, theirs.stops, theirs.rows, theirs.step, sampled, counts)
    verdict = sampled.clone(), counts.clone()
    kernels.commit_tokens(ours.slots, ours.stops, ours.rows, ours.step, *verdict)
    check_slots(ours, theirs, before)
    for group in ("stops", "rows", "step"):
        check_equal(getattr(ours, group), getattr(before, group))


@pytest.mark.interpreted
@SEEDS
def test_failed_rows_keep_their_tokens_and_end(seed: int) -> None:
    from stoop.ops.kernels import inputs as kernels

    rng = random.Random(seed)
    ours = prepared_case(rng)
    theirs, before = ours.copy(), ours.copy()
    sampled, counts = random_verdict(rng, ours)
    failed = [row for row in range(ours.num_live) if counts[row] and rng.random() < 0.6]
    for row in failed:
        counts[row] = -counts[row]  # one token less than it had, and then none
    reference.commit_tokens(theirs.slots, theirs.stops, theirs.rows, theirs.step, sampled, counts)
    kernels.commit_tokens(ours.slots, ours.stops, ours.rows, ours.step, sampled, counts)
    check_slots(ours, theirs, before)
    for row in failed:
        slot = ours.step.row_slots[row]
        assert ours.slots.token_limit[slot] == 0
        num_new = ours.slots.num_tokens[slot] - before.slots.num_tokens[slot]
        assert num_new == -1 - counts[row]


@pytest.mark.interpreted
def test_a_step_and_the_one_behind_it_equal_torch() -> None:
    """Requests that a step ends are padding in the next, in both."""
    from stoop.ops.kernels import inputs as kernels

    ended = 0
    for seed in range(12):
        rng = random.Random(seed)
        ours = random_case(rng)
        theirs = ours.copy()
        for _ in range(3):
            sink = ours.slots.token_ids[-1].clone()
            for case, module in ((theirs, reference), (ours, kernels)):
                module.prepare_inputs(case.slots, case.rows, case.step, BLOCK)
            check_equal(ours.step, theirs.step)
            verdict = random_verdict(rng, ours)
            for case, module in ((theirs, reference), (ours, kernels)):
                module.commit_tokens(case.slots, case.stops, case.rows, case.step, *verdict)
            theirs.slots.token_ids[-1] = sink  # torch writes what is not taken there
            check_equal(ours.slots, theirs.slots)
        mapping = ours.rows.idx_mapping[: ours.num_live]
        ended += int((ours.step.row_slots[: ours.num_live] != mapping).sum())
    assert ended > 10


# A run, and where the first of its tokens that ends the request stands.
RUN = [1001, 1002, 1003, 1004]
STOPS = [
    *(([RUN[place]], 1, 0, True) for place in range(4)),  # at every place of the run
    ([7, 8, 1003], 3, 0, True),  # the last of several
    ([1002, 1003, 9], 3, 0, True),
    ([7, 8, 1003], 2, 0, False),  # past those that count
    ([1001, 1002, 1003, 1004], 0, 0, False),
    ([7, 8], 2, 0, False),
    ([1003], 1, 4, True),  # two tokens of the answer are known: it is the fifth
    ([1003], 1, 5, False),
    ([1001, 1004], 2, 5, True),  # the first is too early, the last is not
    ([1001, 1004], 2, 6, False),
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("ids", "count", "min_tokens", "ends"), STOPS)
@pytest.mark.parametrize("in_torch", [False, True])
def test_stop_tokens(
    ids: list[int], count: int, min_tokens: int, ends: bool, in_torch: bool
) -> None:
    from stoop.ops.kernels import inputs as kernels

    module = reference if in_torch else kernels
    case = make_case(3, 12, 23)
    slots, stops = case.slots, case.stops
    case.rows.idx_mapping.copy_(torch.tensor([2, 0, -1]))
    case.rows.query_start_loc.copy_(torch.tensor([0, 4, 8, 8]))
    slots.num_tokens[[0, 2]], slots.num_computed[[0, 2]] = 10, 9
    slots.num_prompt_tokens[[0, 2]], slots.num_drafts[[0, 2]] = 8, 3
    slots.token_limit[[0, 2]] = 23
    stops.min_tokens[2], stops.stop_counts[2] = min_tokens, count
    stops.stop_ids[2, : len(ids)] = torch.tensor(ids)
    stops.stop_ids[0] = 1003  # its neighbour has none
    module.prepare_inputs(slots, case.rows, case.step, BLOCK)
    sampled = torch.tensor([RUN, RUN, RUN])
    counts = torch.tensor([4, 4, 0])
    module.commit_tokens(slots, stops, case.rows, case.step, sampled, counts)
    assert slots.token_limit[2] == (0 if ends else 23) and slots.token_limit[0] == 23
    assert slots.num_tokens.tolist() == [14, 0, 14, 0, 0]  # a run is taken whole
    assert slots.num_computed.tolist() == [13, 0, 13, 0, 0]
    module.prepare_inputs(slots, case.rows, case.step, BLOCK)
    assert case.step.row_slots.tolist() == [slots.sink if ends else 2, 0, slots.sink]
    assert case.step.samples.tolist() == [0 if ends else 1, 1, 0]


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(20))
def test_rows_of_tokens_equal_torch(seed: int) -> None:
    """Any numbers of rows and tokens, empty rows at every place."""
    from stoop.ops.kernels import inputs as kernels

    rng = random.Random(seed)
    case = make_case(rng.choice((1, 2, 3, 7, 8, 9, 33)), 64, 23)
    start = 0
    for row in range(case.max_reqs):
        case.rows.idx_mapping[row] = row
        start += min(rng.choice((0, 0, 1, 3)), case.max_tokens - start)
        case.rows.query_start_loc[row + 1 :] = start
        case.slots.num_tokens[row] = case.max_len
        case.slots.num_computed[row] = rng.randint(0, case.max_len)
        case.slots.token_limit[row] = case.max_len + rng.randint(0, 1)  # of some, it has ended
    other = case.copy()
    kernels.prepare_inputs(case.slots, case.rows, case.step, BLOCK)
    reference.prepare_inputs(other.slots, other.rows, other.step, BLOCK)
    check_equal(case.step, other.step)


@pytest.mark.interpreted
def test_places_beyond_32_bits() -> None:
    """Slots so far apart that a token's place is no int32; memory in between is never touched."""
    from stoop.ops.kernels import inputs as kernels

    case = make_case(2, 8, 23)
    apart = 2**31 // 2 + 3
    size, stride = case.slots.token_ids.shape, (apart, 1)
    try:
        vast = torch.empty(apart * size[0], dtype=torch.int32).as_strided(size, stride)
    except RuntimeError:
        pytest.skip("this machine hands out no more memory than it has")
    vast.copy_(torch.arange(vast.numel()).view(size))
    slots = replace(case.slots, token_ids=vast)
    case.rows.idx_mapping[0], case.rows.query_start_loc[1:] = 2, 4
    slots.num_tokens[2], slots.num_computed[2], slots.token_limit[2] = 10, 6, 23
    kernels.prepare_inputs(slots, case.rows, case.step, BLOCK)
    first = 2 * case.max_len + 6
    assert case.step.input_ids.tolist() == [*range(first, first + 4), 0, 0, 0, 0]
    sampled, counts = torch.tensor([[5, 6], [0, 0]]), torch.tensor([2, 0])
    kernels.commit_tokens(slots, case.stops, case.rows, case.step, sampled, counts)
    assert vast[2, 9:13].tolist() == [first + 3, 5, 6, first + 6]


def test_random_cases_reach_every_kind() -> None:
    """What kernels are held against: dead tokens, drafts, chunks, padding, the last position."""
    dead = drafted = chunks = padded = full = empty = ended = stopped = 0
    for seed in range(30):
        rng = random.Random(seed)
        case = prepared_case(rng)
        live, step = case.num_live, case.step
        ended += int((step.row_slots[:live] == case.slots.sink).sum())
        lengths = case.rows.query_start_loc.diff()[:live]
        dead += int((lengths > (step.seq_lens - step.context_lens)[:live]).sum())
        drafted += int((step.row_drafts > 0).sum())
        chunks += int((step.samples[:live] == 0).sum())
        padded += live < case.max_reqs
        empty += live == 0
        full += int((step.seq_lens == case.max_len - 1).sum())
        limits = case.slots.token_limit.clone()
        verdict = random_verdict(rng, case)
        reference.commit_tokens(case.slots, case.stops, case.rows, step, *verdict)
        stopped += int((case.slots.token_limit < limits).sum())
    assert min(dead, drafted, chunks, padded, full, ended, stopped) > 10 and empty


# ---- for an H200 ----


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8, 16])
def test_inputs_compile_for_an_h200(num_drafts: int) -> None:
    from stoop.ops.kernels import inputs as kernels

    case = engine_case(num_drafts)
    sampled = torch.zeros(case.max_reqs, num_drafts + 1, dtype=torch.int64)
    counts = sampled[:, 0].clone()
    with compile_launches() as found:
        kernels.prepare_inputs(case.slots, case.rows, case.step, 16)
        kernels.commit_tokens(case.slots, case.stops, case.rows, case.step, sampled, counts)
    check_compiled(found, 2)


@pytest.mark.interpreted
@SEEDS
def test_pending_tokens_equal_torch(seed: int) -> None:
    from stoop.ops import recurrent
    from stoop.ops.kernels import recurrent as recurrent_kernels

    rng = random.Random(seed)
    case = prepared_case(rng)
    case.slots.num_computed.random_(0, case.max_len)
    ours = torch.full_like(case.slots.num_computed, 77)
    theirs, log_len = ours.clone(), rng.choice((1, 4, 8))
    recurrent.commit_pending.reference(case.slots, case.rows, case.step, theirs, log_len)
    recurrent_kernels.commit_pending(case.slots, case.rows, case.step, ours, log_len)
    assert torch.equal(ours[:-1], theirs[:-1]) and ours[-1] == 77  # the sink
