"""CPU kernels of the phases around the forward pass, against their torch references."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stoop.ops import drafting, inputs, sampling, verification
from stoop.ops.drafting import PrefillTensors
from stoop.ops.inputs import RowTensors, StepTensors
from stoop.ops.native import steps
from stoop.sampling.verifier import Verdict
from support.step_cases import (
    BLOCK,
    POISON,
    Case,
    check_equal,
    check_slots,
    prepared_case,
    random_case,
    random_verdict,
    verified_case,
)

pytestmark = pytest.mark.usefixtures("native")
SEEDS = range(60)


def unchanged(case: Case, before: Case) -> None:
    for group in ("slots", "rows", "step"):
        check_equal(getattr(case, group), getattr(before, group))


def test_inputs() -> None:
    for seed in SEEDS:
        ours = random_case(random.Random(seed))
        theirs = ours.copy()
        inputs.prepare_inputs.reference(theirs.slots, theirs.rows, theirs.step, BLOCK)
        steps.prepare_inputs(ours.slots, ours.rows, ours.step, BLOCK)
        check_equal(ours.step, theirs.step)
        check_equal(ours.slots, theirs.slots)


def test_commit() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        ours = prepared_case(rng)
        theirs, before = ours.copy(), ours.copy()
        verdict = random_verdict(rng, ours)
        if seed % 3 == 0:  # the first row's logits are NaN
            verdict[1][0] = -1
        groups = (theirs.slots, theirs.stops, theirs.rows, theirs.step)
        inputs.commit_tokens.reference(*groups, *verdict)
        steps.commit_tokens(ours.slots, ours.stops, ours.rows, ours.step, *verdict)
        check_slots(ours, theirs, before)


@pytest.mark.parametrize("mode", ["match", "accepts", "no drafts"])
def test_verdict(mode: str) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        case = prepared_case(rng)
        before = case.copy()
        count = rng.randint(max(case.num_live, 1), case.max_reqs)
        width = 1 if mode == "no drafts" else case.num_drafts + 1
        chosen = torch.randint(1000, 2000, (count, width))
        drafts = verification.drafts_of(case.slots, case.step, count, width)
        same = torch.rand(count, width - 1) < 0.7
        chosen[:, :-1] = torch.where(same, drafts[:, : width - 1], chosen[:, :-1])
        chosen[torch.rand(count, width) < 0.1] = -1  # no token there
        accepts = (torch.rand(count, width - 1) < 0.7) if mode == "accepts" else None
        results = []
        for write in (steps.write_verdict, verification.write_verdict.reference):
            verdict = Verdict.make(case.max_reqs, case.num_drafts + 1, torch.device("cpu"))
            verdict.packed.fill_(POISON)
            outs = (verdict.token_ids, verdict.num_tokens, verdict.num_drafts)
            write(chosen, accepts, case.slots, case.step, *outs)
            results.append(verdict.packed)
        assert torch.equal(*results), seed
        unchanged(case, before)


def test_draft_prefill() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        case = verified_case(rng)
        if seed % 2:  # the first row has failed, without a token
            case.slots.num_computed[case.step.row_slots[0]] = case.step.context_lens[0]
        before, limit = case.copy(), rng.randint(1, case.max_len)
        results = []
        for prepare in (
            steps.prepare_draft_prefill,
            drafting.prepare_draft_prefill.reference,
        ):
            out = PrefillTensors(
                token_ids=torch.full((case.max_tokens,), POISON, dtype=torch.int32),
                last_token_indices=torch.full((case.max_reqs,), POISON),
                room=torch.full((case.max_reqs,), POISON),
            )
            prepare(case.slots, case.rows, case.step, out, limit)
            results.append(out)
        check_equal(*results)
        unchanged(case, before)


def drafting_case(rng: random.Random) -> tuple[Case, Tensor]:
    """Room of every row, and drafts that stand there already."""
    case = verified_case(rng)
    room = drafting.draft_room(case.slots, case.step, case.max_len)
    for row in range(case.num_live):
        slot = int(case.rows.idx_mapping[row])
        case.slots.num_drafts[slot] = rng.randint(0, int(room[row]))
    return case, room


def poisoned_decode(case: Case) -> tuple[RowTensors, StepTensors]:
    def full(dtype: torch.dtype = torch.int64, more: int = 0) -> Tensor:
        return torch.full((case.max_reqs + more,), POISON, dtype=dtype)

    own = {name: full() for name in ("positions", "slot_mapping")}
    own |= {name: full(torch.int32) for name in ("input_ids", "context_lens", "seq_lens")}
    return RowTensors(case.rows.idx_mapping, full(torch.int32, 1)), replace(case.step, **own)


def test_draft_decode() -> None:
    for seed in SEEDS:
        case, room = drafting_case(random.Random(seed))
        before, results = case.copy(), []
        for prepare in (steps.prepare_draft_decode, drafting.prepare_draft_decode.reference):
            rows, step = poisoned_decode(case)
            prepare(case.slots, rows, case.step, room, BLOCK, rows.query_start_loc, step)
            results.append((rows, step))
        for ours, theirs in zip(*results, strict=True):
            check_equal(ours, theirs)
        unchanged(case, before)


def test_draft_commit() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        ours, room = drafting_case(rng)
        theirs, before = ours.copy(), ours.copy()
        count = rng.randint(max(ours.num_live, 1), ours.max_reqs)
        d2t = torch.randint(0, 1000, (3000,)) if seed % 2 else None
        for _ in range(2):
            drafts = torch.randint(2000, 3000, (count,))
            mine = steps.commit_draft(ours.slots, ours.step, room, drafts, d2t)
            other = drafting.commit_draft.reference(theirs.slots, theirs.step, room, drafts, d2t)
            assert mine.dtype == other.dtype and torch.equal(mine, other)
        check_slots(ours, theirs, before)


def test_ngram_lookup() -> None:
    """Of few different tokens, so that many n-grams repeat."""
    num_found = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        ours = verified_case(rng)
        torch.manual_seed(seed)
        few = rng.choice((1, 2, 5))
        ours.slots.token_ids.copy_(torch.randint(1, few + 1, ours.slots.token_ids.shape))
        ours.slots.draft_limit[:-1].fill_(ours.num_drafts)
        ours.slots.token_limit[:-1].fill_(ours.max_len)
        theirs, before = ours.copy(), ours.copy()
        least = rng.randint(1, 4)
        sizes = (least, rng.randint(least, 6))
        room = drafting.draft_room(ours.slots, ours.step, ours.max_len)
        groups = (ours.slots, ours.step, room, sizes, ours.num_drafts)
        steps.look_up_ngrams(*groups)
        drafting.look_up_ngrams.reference(theirs.slots, theirs.step, *groups[2:])
        check_slots(ours, theirs, before)
        check_equal(ours.step, before.step)
        live = ours.step.row_slots[ours.step.row_slots != ours.slots.sink]
        num_found += int((ours.slots.num_drafts[live] > 0).sum())
    assert num_found > 20


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 1000, 1023, 1024, 1025, 1040, 3000])
def test_greedy(width: int, checks: bool) -> None:
    """The first of equal ones; NaN and infinities at the ends and in the middle."""
    torch.manual_seed(width)
    logits = torch.randint(-4, 5, (40, width)).float()  # many are equal
    places = [0, width - 1, width // 2, max(0, width - 5)]
    for row, value in enumerate((float("nan"), float("inf"), float("-inf"), 9.0)):
        for number, place in enumerate(places):
            logits[4 * row + number, place] = value
    logits[20] = float("-inf")
    logits[21] = float("-inf")
    logits[21, width - 1] = -3e38
    logits[22] = float("nan")
    logits[23, places[1]], logits[23, 0] = float("inf"), float("nan")
    for given in (logits, logits[::2], torch.cat((logits, logits), 1)[:, :width]):
        ours = steps.greedy(given, checks)
        assert torch.equal(ours, sampling.greedy.reference(given, checks))
