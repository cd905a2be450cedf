"""Which drafts stand: runs, joints, and that what comes out has the target's distribution."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.batch.request_state import RequestState
from stoop.batch.staging import StagedWrites
from stoop.config.schema import SpecConfig
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import Admission, PlannedRow
from stoop.ops import verification as ops
from stoop.ops.random import Purpose, gumbel, uniform
from stoop.sampling.sampler import Positions, Sampler, SamplingNeeds
from stoop.sampling.state import SamplingState
from stoop.sampling.verifier import Verdict, Verifier
from support.scheduling import make_rules
from support.slot_state import CPU

SETTINGS = settings(derandomize=True, deadline=None, max_examples=150)
SEEDS = st.integers(0, 2**32)
P = torch.tensor([0.05, 0.4, 0.25, 0.0, 0.3], dtype=torch.float64)
Q = torch.tensor([0.3, 0.1, 0.2, 0.2, 0.2], dtype=torch.float64)
DRAWS = 40_000


def check_counts(found: torch.Tensor, probs: torch.Tensor) -> None:
    """Tokens against their exact distribution; impossible ones never come."""
    counts = np.bincount(found.numpy(), minlength=len(probs))
    possible = probs.numpy() > 0
    assert counts[~possible].sum() == 0, "an impossible token came up"
    expected = probs.numpy()[possible] / probs.numpy()[possible].sum() * len(found)
    assert stats.chisquare(counts[possible], expected).pvalue > 1e-4


def check_share(accepts: torch.Tensor, chance: float) -> None:
    count = int(accepts.sum())
    assert stats.binomtest(count, accepts.numel(), chance).pvalue > 1e-4, (count, chance)


# ---- runs and joints ----


@SETTINGS
@given(SEEDS)
def test_accepted_run_equals_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    n, width = rng.randint(1, 6), rng.randint(1, 5)
    accepts = [[rng.random() < 0.7 for _ in range(width)] for _ in range(n)]
    num_drafts = [rng.randint(0, width) for _ in range(n)]
    expected = []
    for row, count in zip(accepts, num_drafts, strict=True):
        run = 0
        while run < count and row[run]:
            run += 1
        expected.append(run)
    found = ops.count_accepted(torch.tensor(accepts), torch.tensor(num_drafts))
    assert found.tolist() == expected and found.dtype is torch.int64


def test_what_follows_a_refused_draft_does_not_count() -> None:
    accepts = torch.tensor([[True, False, True], [False, True, True], [True, True, True]])
    assert ops.count_accepted(accepts, torch.tensor([3, 3, 3])).tolist() == [1, 0, 3]
    # Nor does what is no draft, whatever stands there.
    assert ops.count_accepted(accepts, torch.tensor([0, 0, 2])).tolist() == [0, 0, 2]


@SETTINGS
@given(SEEDS)
def test_joined_tokens_equal_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    n, width = rng.randint(1, 6), rng.randint(1, 5)
    drafts = [[rng.randint(1, 99) for _ in range(width)] for _ in range(n)]
    chosen = [[rng.randint(100, 199) for _ in range(width + 1)] for _ in range(n)]
    accepted = [rng.randint(0, width) for _ in range(n)]
    expected = []
    for row, behind, count in zip(drafts, chosen, accepted, strict=True):
        expected.append([*row[:count], behind[count], *[0] * (width - count)])
    found = ops.join_tokens(torch.tensor(drafts), torch.tensor(accepted), torch.tensor(chosen))
    assert found.tolist() == expected


# ---- the ratio test ----


def many(count: int = DRAWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of independent draws: as many seeds at a few positions."""
    return torch.arange(count), torch.arange(count) % 7 + 3


def drawn(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A draft of each key, of the drafter's own stream."""
    noise = gumbel(seeds, positions, Purpose.DRAFT, probs.shape[0])
    return (probs.log() + noise).argmax(dim=1)


@pytest.mark.parametrize("draft", range(5))
def test_a_draft_is_accepted_by_the_ratio_of_its_chances(draft: int) -> None:
    seeds, positions = many()
    drafts = torch.full((DRAWS, 1), draft)
    probs, draft_probs = P.expand(DRAWS, 1, 5), Q.expand(DRAWS, 1, 5)
    accepts = ops.accept_by_ratio(probs, draft_probs, drafts, seeds, positions)
    chance = min(1.0, float(P[draft] / Q[draft]))
    if chance in (0.0, 1.0):
        assert bool((accepts == bool(chance)).all())
    else:
        check_share(accepts, chance)


def test_positions_of_a_row_are_judged_independently() -> None:
    seeds, _ = many()
    positions = torch.full((DRAWS,), 5)
    probs, draft_probs = P.expand(DRAWS, 3, 5), Q.expand(DRAWS, 3, 5)
    drafts = torch.zeros(DRAWS, 3, dtype=torch.int64)
    accepts = ops.accept_by_ratio(probs, draft_probs, drafts, seeds, positions)
    chance = float(P[0] / Q[0])
    for j in range(3):
        check_share(accepts[:, j], chance)
    check_share(accepts[:, 0] & accepts[:, 1], chance**2)
    # A position has one number, whichever draft of a row reaches it.
    later = ops.accept_by_ratio(probs, draft_probs, drafts, seeds, positions + 1)
    assert torch.equal(later[:, :2], accepts[:, 1:])


def test_each_position_is_judged_by_its_own_row_of_chances() -> None:
    seeds, positions = torch.tensor([3, 4]), torch.tensor([0, 9])
    never, always = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    probs = torch.stack((torch.stack((always, never)), torch.stack((never, always))))
    draft_probs = torch.full((2, 2, 2), 0.5)
    drafts = torch.zeros(2, 2, dtype=torch.int64)
    accepts = ops.accept_by_ratio(probs, draft_probs, drafts, seeds, positions)
    assert accepts.tolist() == [[True, False], [False, True]]


def test_residual_is_what_the_target_has_more_of() -> None:
    seeds, positions = many()
    found = ops.draw_residual(P.expand(DRAWS, 1, 5), Q.expand(DRAWS, 1, 5), seeds, positions)
    check_counts(found[:, 0], (P - Q).clamp(min=0))


def test_residual_of_every_position_of_a_row() -> None:
    seeds, positions = many()
    probs = torch.stack((P, Q)).expand(DRAWS, 2, 5)
    draft_probs = torch.stack((Q, P)).expand(DRAWS, 2, 5)
    found = ops.draw_residual(probs, draft_probs, seeds, positions)
    check_counts(found[:, 0], (P - Q).clamp(min=0))
    check_counts(found[:, 1], (Q - P).clamp(min=0))


def test_an_empty_residual_draws_from_the_target() -> None:
    seeds, positions = many()
    found = ops.draw_residual(P.expand(DRAWS, 1, 5), P.expand(DRAWS, 1, 5), seeds, positions)
    check_counts(found[:, 0], P)


@pytest.mark.parametrize(("p", "q"), [(P, Q), (Q, P), (P, P), (Q, torch.ones(5).double() / 5)])
def test_a_draft_accepted_or_replaced_has_the_targets_distribution(
    p: torch.Tensor, q: torch.Tensor
) -> None:
    """The theorem of speculative sampling, over all streams of noise together."""
    seeds, positions = many()
    drafts = drawn(q, seeds, positions)[:, None]
    probs, draft_probs = p.expand(DRAWS, 1, 5), q.expand(DRAWS, 1, 5)
    accepts = ops.accept_by_ratio(probs, draft_probs, drafts, seeds, positions)
    redrawn = ops.draw_residual(probs, draft_probs, seeds, positions)
    tokens = torch.where(accepts, drafts, redrawn)[:, 0]
    check_counts(tokens, p)
    check_share(accepts, min(float(torch.minimum(p, q).sum()), 1.0))


def test_residual_with_the_drafts_own_noise_would_be_wrong() -> None:
    """Noise that chose a refused draft is no longer noise: the test above must notice."""
    seeds, positions = many()
    noise = gumbel(seeds, positions, Purpose.DRAFT, 5)
    drafts = (Q.log() + noise).argmax(dim=1)[:, None]
    probs, draft_probs = P.expand(DRAWS, 1, 5), Q.expand(DRAWS, 1, 5)
    accepts = ops.accept_by_ratio(probs, draft_probs, drafts, seeds, positions)
    redrawn = ((P - Q).clamp(min=0).log() + noise).argmax(dim=1)[:, None]
    with pytest.raises(AssertionError):
        check_counts(torch.where(accepts, drafts, redrawn)[:, 0], P)


# ---- synthetic acceptance ----


def test_synthetic_acceptance_has_its_rates() -> None:
    rates = torch.tensor([0.9, 0.5, 0.0, 1.0])
    seeds, positions = many()
    accepts = ops.accept_at_rate(rates, seeds, positions)
    assert accepts.shape == (DRAWS, 4)
    check_share(accepts[:, 0], 0.9)
    check_share(accepts[:, 1], 0.5)
    assert not accepts[:, 2].any() and bool(accepts[:, 3].all())
    run = ops.count_accepted(accepts, torch.full((DRAWS,), 4))
    check_share(run >= 2, 0.45)
    assert int(run.max()) == 2


def test_synthetic_acceptance_uses_the_stream_of_acceptance() -> None:
    seeds, positions = torch.tensor([5, 6]), torch.tensor([10, 20])
    accepts = ops.accept_at_rate(torch.tensor([0.5, 0.5]), seeds, positions)
    for row in range(2):
        for j in range(2):
            number = uniform(seeds[row : row + 1], positions[row : row + 1] + j, Purpose.ACCEPT, 1)
            assert bool(accepts[row, j]) == (float(number) < 0.5)


# ---- the verifier ----

K, VOCAB, MAX_LEN = 2, 5, 16


class Rig:
    """Slots that all know the same text, with drafts behind it, verified in one batch."""

    def __init__(self, params: list[SamplingParams], drafts: torch.Tensor, **spec: Any) -> None:
        n = len(params)
        self.state = RequestState(n, MAX_LEN, 4, CPU)
        sampling = SamplingState.make(n, CPU)
        staged = StagedWrites(CPU)
        rules = [make_rules(10, each, seed=slot) for slot, each in enumerate(params)]
        for slot, each in enumerate(rules):
            self.state.admit(staged, Admission(slot, [1, 2, 3], 2, 2, each, 12))
            sampling.admit(staged, slot, each)
        staged.apply()
        slots = self.state.tensors
        slots.token_ids[:n, 3 : 3 + K] = drafts
        self.drafts, self.num_drafts = drafts, torch.full((n,), K)
        self.sampler = Sampler(sampling, slots)
        config = SpecConfig(**{"method": "eagle", "num_drafts": K, **spec})
        self.verifier = Verifier(self.sampler, config, VOCAB)
        self.needs = SamplingNeeds.of(rules)
        self.rules = rules

    def verify(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: [K + 1, VOCAB], the same for all rows"""
        n = len(self.rules)
        slots = self.state.tensors
        slots.num_drafts[:n] = self.num_drafts
        buffers = InputBuffers(n, n * (K + 1), CPU)
        batch = buffers.load_rows([self._row(slot) for slot in range(n)])
        buffers.fill(slots, 4)
        behind = torch.minimum(torch.arange(K + 1), batch.row_drafts[:, None])
        slot = batch.row_slots.repeat_interleave(K + 1)
        where = Positions(slot, slots.num_tokens[slot] + behind.flatten(), 8)
        every = logits[behind].flatten(0, 1).clone()
        out = self.out = Verdict.make(n, K + 1, CPU)
        self.verifier.verify(every, batch, where, self.needs, out)
        return out.token_ids, out.num_tokens

    def _row(self, slot: int) -> PlannedRow:
        return PlannedRow(
            request_id=f"r{slot}",
            epoch=0,
            slot=slot,
            num_tokens=K + 1,
            num_computed=2,
            seq_len=3 + K,
            num_reserved=MAX_LEN,
            samples=True,
            decodes=True,
            rules=self.rules[slot],
            num_prompt_tokens=2,
        )


GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
NOISY = SamplingParams(temperature=1.0, max_tokens=None)
# The likeliest tokens are 4, then 1, then 2.
LOGITS = torch.eye(VOCAB, dtype=torch.float64)[torch.tensor([4, 1, 2])] * 3


def test_greedy_drafts_stand_as_long_as_they_are_the_likeliest() -> None:
    drafts = torch.tensor([[4, 1], [4, 3], [0, 1], [4, 1], [4, 1]])
    rig = Rig([GREEDY] * 5, drafts)
    rig.num_drafts = torch.tensor([2, 2, 2, 1, 0])
    tokens, counts = rig.verify(LOGITS)
    assert counts.tolist() == [3, 2, 1, 2, 1]
    assert tokens.tolist() == [[4, 1, 2], [4, 1, 0], [4, 0, 0], [4, 1, 0], [4, 0, 0]]


def test_noisy_rows_accept_what_plain_decoding_would_draw() -> None:
    """Greedy drafts, sampled target: the tokens are those of the plain draws, drafts or none."""
    n = 400
    generator = torch.Generator().manual_seed(1)
    drafts = torch.randint(VOCAB, (n, K), generator=generator)
    rig = Rig([NOISY] * n, drafts)
    tokens, counts = rig.verify(LOGITS)
    state = rig.sampler.state
    plain = []
    for j in range(K + 1):
        where = Positions(torch.arange(n), torch.full((n,), 3 + j), 8)
        plain.append(rig.sampler.draw(LOGITS[j].expand(n, -1).clone(), where, rig.needs))
    assert state.seeds[:n].tolist() == list(range(n))
    for row in range(n):
        expected = [int(plain[0][row])]
        while len(expected) <= K and expected[-1] == int(drafts[row, len(expected) - 1]):
            expected.append(int(plain[len(expected)][row]))
        assert tokens[row, : int(counts[row])].tolist() == expected
    assert set(counts.tolist()) == {1, 2, 3}


def drawn_rig(params: list[SamplingParams], draft_logits: torch.Tensor) -> Rig:
    """Drafts drawn from `draft_logits` [K, VOCAB], which the verifier knows."""
    seeds = torch.arange(len(params))
    drafts = [drawn(draft_logits[j].softmax(0), seeds, seeds * 0 + 3 + j) for j in range(K)]
    rig = Rig(params, torch.stack(drafts, dim=1), draft_sample_method="probabilistic")
    assert rig.verifier.draft_logits is not None
    rig.verifier.draft_logits[:-1] = draft_logits.float()
    return rig


def test_drawn_drafts_leave_the_targets_distribution_at_every_position() -> None:
    n = 8_000
    draft_logits = torch.tensor([[1.0, 0.0, 2.0, 0.5, 1.0], [0.0, 1.0, 0.0, 1.0, 0.0]])
    rig = drawn_rig([NOISY] * n, draft_logits)
    logits = LOGITS / 2
    tokens, counts = rig.verify(logits)
    check_counts(tokens[:, 0], logits[0].softmax(0))
    for j in (1, 2):  # of rows that get there: what came before must not shape what follows
        check_counts(tokens[counts > j, j], logits[j].softmax(0))
    overlap = torch.minimum(logits[0].softmax(0), draft_logits[0].double().softmax(0)).sum()
    check_share(counts > 1, float(overlap))


def test_positions_without_a_draft_are_drawn_plainly() -> None:
    """Nothing is taken off a distribution that no draft was drawn from."""
    n = 8_000
    rig = drawn_rig([NOISY] * n, torch.zeros(K, VOCAB))
    rig.num_drafts = torch.zeros(n, dtype=torch.int64)
    tokens, counts = rig.verify(LOGITS / 2)
    assert set(counts.tolist()) == {1}
    check_counts(tokens[:, 0], (LOGITS[0] / 2).softmax(0))
    where = Positions(torch.arange(n), torch.full((n,), 3), 8)
    plain = rig.sampler.draw((LOGITS[0] / 2).expand(n, -1).clone(), where, rig.needs)
    assert torch.equal(tokens[:, 0], plain)


def test_greedy_rows_beside_drawn_ones_keep_to_matches() -> None:
    rig = drawn_rig([GREEDY, NOISY, GREEDY], torch.zeros(K, VOCAB))
    rig.state.tensors.token_ids[0, 3 : 3 + K] = torch.tensor([4, 1])
    rig.state.tensors.token_ids[2, 3 : 3 + K] = torch.tensor([4, 0])
    tokens, counts = rig.verify(LOGITS)
    assert counts[[0, 2]].tolist() == [3, 2]
    assert tokens[0].tolist() == [4, 1, 2] and tokens[2].tolist() == [4, 1, 0]


@pytest.mark.parametrize("params", [GREEDY, NOISY])
@pytest.mark.parametrize("method", ["greedy", "coupled", "probabilistic"])
def test_synthetic_acceptance_looks_at_no_token(params: SamplingParams, method: str) -> None:
    n = 4000
    drafts = torch.zeros(n, K, dtype=torch.int64)  # never the likeliest
    rig = Rig([params] * n, drafts, synthetic_rates=(0.5, 1.0), draft_sample_method=method)
    tokens, counts = rig.verify(LOGITS)
    assert set(counts.tolist()) == {1, 3}
    check_share(counts == 3, 0.5)
    assert not tokens[counts == 3, :K].any()  # the drafts themselves
    rig.num_drafts = torch.ones(n, dtype=torch.int64)
    assert set(rig.verify(LOGITS)[1].tolist()) == {1, 2}


def test_rows_that_sample_nothing_yield_nothing() -> None:
    rig = Rig([GREEDY] * 2, torch.tensor([[4, 1], [4, 1]]))
    rig.state.tensors.num_tokens[1] = 12  # its step is a chunk
    rig.num_drafts = torch.tensor([K, 0])
    assert rig.verify(LOGITS)[1].tolist() == [3, 0]


def test_a_batch_without_drafts_has_one_position_a_row() -> None:
    rig = Rig([GREEDY] * 2, torch.tensor([[4, 1], [4, 1]]))
    buffers = InputBuffers(3, 9, CPU)
    batch: InputBatch = buffers.load_rows([rig._row(0), rig._row(1)])
    buffers.fill(rig.state.tensors, 4)
    where = Positions(batch.row_slots, rig.state.tensors.num_tokens[:2], 8)
    out = Verdict.make(3, K + 1, CPU)
    out.packed.fill_(7)  # stale
    rig.verifier.verify(LOGITS[:2].clone(), batch, where, rig.needs, out)
    assert out.token_ids.tolist() == [[4, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert out.num_tokens.tolist() == [1, 1, 0] and out.num_drafts.tolist() == [0, 0, 0]


def test_a_row_whose_request_has_ended_yields_nothing() -> None:
    rig = Rig([GREEDY] * 3, torch.tensor([[4, 1]] * 3))
    rig.state.tensors.token_limit[1] = 0
    assert rig.verify(LOGITS)[1].tolist() == [3, 0, 3]


def test_a_verdict_tells_how_many_drafts_were_verified() -> None:
    rig = Rig([GREEDY] * 4, torch.tensor([[4, 1], [4, 3], [0, 1], [4, 1]]))
    rig.num_drafts = torch.tensor([2, 1, 0, 2])
    rig.state.tensors.token_limit[3] = 3
    rig.verify(LOGITS)
    assert rig.out.num_drafts.tolist() == [2, 1, 0, 0]


def test_verdict_starts_empty() -> None:
    verdict = Verdict.make(3, K + 1, CPU)
    assert verdict.token_ids.shape == (3, K + 1)
    assert verdict.num_tokens.shape == verdict.num_drafts.shape == (3,)
    assert not verdict.packed.any()


def test_a_packed_verdict_holds_every_part_once() -> None:
    verdict = Verdict.make(3, K + 1, CPU)
    verdict.token_ids.copy_(torch.arange(3 * (K + 1)).view(3, -1))
    verdict.num_tokens.copy_(torch.arange(100, 103))
    verdict.num_drafts.copy_(torch.arange(200, 203))
    assert verdict.packed.tolist() == [*range(3 * (K + 1)), *range(100, 103), *range(200, 203)]
    copy = Verdict.of(verdict.packed.clone(), 3)
    verdict.packed.zero_()
    assert copy.token_ids.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert copy.num_tokens.tolist() == [100, 101, 102]
    assert copy.num_drafts.tolist() == [200, 201, 202]
