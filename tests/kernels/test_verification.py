"""Verdicts against torch, over random slot state and poisoned buffers."""

import random

import pytest
import torch
from torch import Tensor

from stoop.ops import verification as reference
from stoop.sampling.verifier import Verdict
from support.kernel_compiling import compile_launches
from support.step_cases import (
    POISON,
    SEEDS,
    Case,
    check_compiled,
    check_equal,
    engine_case,
    prepared_case,
)


def drafts_of(case: Case, count: int) -> Tensor:
    """[count, K] int64, with whatever stands where there are none"""
    slot = case.step.row_slots[:count]
    place = case.slots.num_tokens[slot][:, None] + torch.arange(case.num_drafts)
    return case.slots.token_ids[slot[:, None], place.clamp(max=case.max_len - 1)].long()


def random_choice(rng: random.Random, case: Case, count: int, width: int) -> Tensor:
    """Often the drafts."""
    chosen = torch.randint(1000, 2000, (count, width))
    drafts = drafts_of(case, count)[:, : width - 1]
    same = torch.rand(drafts.shape) < rng.choice((0.5, 0.9))
    chosen[:, : width - 1] = torch.where(same, drafts, chosen[:, : width - 1])
    return chosen


def expected_verdict(chosen: Tensor, accepts: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    """As phase V has it without kernels."""
    count, width = chosen.shape
    samples = case.step.samples[:count].long()
    token_ids = torch.zeros(case.max_reqs, case.num_drafts + 1, dtype=torch.int64)
    num_tokens = torch.zeros(case.max_reqs, dtype=torch.int64)
    if width == 1:
        token_ids[:count, :1], num_tokens[:count] = chosen, samples
        return token_ids, num_tokens
    drafts = drafts_of(case, count)
    stands = chosen[:, :-1] == drafts if accepts is None else accepts.bool()
    num_accepted = reference.count_accepted(stands, case.step.row_drafts[:count])
    token_ids[:count] = reference.join_tokens(drafts, num_accepted, chosen)
    num_tokens[:count] = (num_accepted + 1) * samples
    return token_ids, num_tokens


def poisoned_verdict(case: Case) -> Verdict:
    verdict = Verdict.make(case.max_reqs, case.num_drafts + 1, torch.device("cpu"))
    verdict.packed.fill_(POISON)
    return verdict


def parts(verdict: Verdict) -> tuple[Tensor, Tensor, Tensor]:
    return verdict.token_ids, verdict.num_tokens, verdict.num_drafts


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["match", "bool", "int8", "no drafts"])
@SEEDS
def test_verdict_equals_torch(seed: int, mode: str) -> None:
    from stoop.ops.kernels import verdict as kernels

    rng = random.Random(seed)
    case = prepared_case(rng)
    before = case.copy()
    count = rng.randint(max(case.num_live, 1), case.max_reqs)  # a graph's extent
    width = 1 if mode == "no drafts" else case.num_drafts + 1
    chosen = random_choice(rng, case, count, width)
    accepts = None
    if mode in ("bool", "int8"):
        accepts = (torch.rand(count, width - 1) < 0.7).to(getattr(torch, mode))
    ours = poisoned_verdict(case)
    kernels.write_verdict(chosen, accepts, case.slots, case.step, *parts(ours))
    expected_ids, expected_counts = expected_verdict(chosen, accepts, case)
    assert torch.equal(ours.num_tokens, expected_counts)
    assert torch.equal(ours.token_ids, expected_ids)
    assert torch.equal(ours.num_drafts, case.step.row_drafts)
    theirs = poisoned_verdict(case)
    flags = None if accepts is None else accepts.bool()
    reference.write_verdict(chosen, flags, case.slots, case.step, *parts(theirs))
    assert torch.equal(ours.packed, theirs.packed)  # to the last element of the copy
    for group in ("slots", "rows", "step"):
        check_equal(getattr(case, group), getattr(before, group))


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["match", "bool", "no drafts"])
def test_rows_without_a_token_fail_after_their_accepted_drafts(mode: str) -> None:
    from stoop.ops.kernels import verdict as kernels

    num_failed = 0
    for seed in range(10):
        rng = random.Random(seed)
        case = prepared_case(rng)
        width = 1 if mode == "no drafts" else case.num_drafts + 1
        chosen = random_choice(rng, case, case.max_reqs, width)
        accepts = None if mode != "bool" else torch.rand(case.max_reqs, width - 1) < 0.7
        whole = expected_verdict(chosen, accepts, case)
        broken = chosen.where(torch.rand(chosen.shape) < 0.6, -1)
        ours, theirs = poisoned_verdict(case), poisoned_verdict(case)
        kernels.write_verdict(broken, accepts, case.slots, case.step, *parts(ours))
        reference.write_verdict(broken, accepts, case.slots, case.step, *parts(theirs))
        assert torch.equal(ours.packed, theirs.packed)
        assert (ours.token_ids >= 0).all()  # ids that an embedding can look up
        for row in range(case.max_reqs):
            count = int(ours.num_tokens[row])
            if not case.step.samples[row]:
                assert count == 0
            elif count < 0:
                num_failed += 1
                kept = -1 - count
                assert broken[row, kept] == -1
                assert ours.token_ids[row, :kept].tolist() == whole[0][row, :kept].tolist()
                assert ours.token_ids[row, kept:].tolist() == [0] * (case.num_drafts + 1 - kept)
            else:
                assert (broken[row, count - 1] != -1) and count == int(whole[1][row])
    assert num_failed > 0


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8, 16])
def test_verdict_compiles_for_an_h200(num_drafts: int) -> None:
    from stoop.ops.kernels import verdict as kernels

    case = engine_case(num_drafts)
    chosen = torch.zeros(case.max_reqs, num_drafts + 1, dtype=torch.int64)
    out = parts(Verdict.make(case.max_reqs, num_drafts + 1, torch.device("cpu")))
    with compile_launches() as found:
        for width in {1, num_drafts + 1}:
            for dtype in (None, torch.bool, torch.int8):
                accepts = None if dtype is None else torch.zeros(256, width - 1, dtype=dtype)
                kernels.write_verdict(chosen[:, :width], accepts, case.slots, case.step, *out)
    check_compiled(found, 6 if num_drafts else 3)


@pytest.mark.interpreted
def test_judged_drafts_equal_torch_for_any_slots() -> None:
    """Seeds and draft logits are read by slot, in both: what a request draws is its own."""
    from stoop.ops import verification as reference
    from stoop.ops.kernels import verification as kernels

    torch.manual_seed(5)
    slot = torch.tensor([6, 0, 3])
    logits, draft_logits = torch.randn(3, 4, 50), torch.randn(8, 3, 50)
    drafts, positions = torch.randint(50, (3, 3)), torch.tensor([9, 4, 17])
    seeds = torch.randint(2**60, (8,))
    args = (logits, draft_logits, drafts, seeds, positions, slot)
    accepts, redrawn = kernels.judge_drafts(*args)
    expected, expected_redrawn = reference.judge_drafts(*args)
    assert torch.equal(accepts, expected) and 0 < int(accepts.sum()) < 9
    assert torch.equal(redrawn[~accepts], expected_redrawn[~accepts])
