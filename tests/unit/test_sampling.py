"""Sampling as distributions, and its filters against a slow, plain twin."""

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from stoop.batch.request_state import RequestState
from stoop.batch.staging import StagedWrites
from stoop.core.request import TokenRules
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import Admission
from stoop.ops import sampling as ops
from stoop.sampling.sampler import Positions, Sampler, SamplingNeeds
from stoop.sampling.state import SamplingState
from support.scheduling import make_rules

CPU = torch.device("cpu")
VOCAB = 16
NEVER = -np.inf
SETTINGS = settings(derandomize=True, deadline=None, max_examples=150)


# ---- the slow twin ----


@dataclass(frozen=True)
class Case:
    """A row: what was asked for, what was said, and the model's logits."""

    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 3)
    output: tuple[int, ...] = (4, 5, 5)
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logits: np.ndarray = field(default_factory=lambda: np.linspace(-1, 1, VOCAB))

    def rules(self, seed: int = 0) -> TokenRules:
        return make_rules(100, self.params, seed, self.stop_ids, self.bad_words)


def f32(value: float) -> float:
    """Parameters live on the device in float32."""
    return float(np.float32(value))


def twin_logits(case: Case) -> np.ndarray:
    """Logits after bias, bans and penalties; one token at a time."""
    params, logits = case.params, case.logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += f32(bias)
    for token in range(VOCAB):
        if token in case.stop_ids and len(case.output) < params.min_tokens:
            logits[token] = NEVER
        for word in case.bad_words:
            before = word[:-1]
            said = case.output[len(case.output) - len(before) :] if before else ()
            if word[-1] == token and len(case.output) >= len(before) and said == before:
                logits[token] = NEVER
        if token in case.prompt + case.output:
            penalty = f32(params.repetition_penalty)
            logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        count = case.output.count(token)
        logits[token] -= f32(params.frequency_penalty) * count
        logits[token] -= f32(params.presence_penalty) * (count > 0)
    return logits


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def twin_probs(case: Case) -> np.ndarray:
    """The exact distribution of the next token."""
    params, logits = case.params, twin_logits(case)
    if params.greedy:
        return np.eye(VOCAB)[logits.argmax()]
    probs = softmax(logits / f32(params.temperature))
    probs[probs < f32(params.min_p) * probs.max()] = 0
    order = sorted(range(VOCAB), key=lambda token: -probs[token])
    if params.top_k:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    mass = 0.0
    for rank, token in enumerate(order):
        if rank and mass >= f32(params.top_p):
            probs[token] = 0
        mass += probs[token]
    return probs / probs.sum()


def check_distribution(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Draws against the exact distribution; impossible tokens never come."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0, "an impossible token came up"
    expected = probs * len(tokens)
    common = expected >= 5
    found = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] < 5:  # too few to count: leave them out on both sides
        found, wanted = found[:-1], wanted[:-1]
    if len(found) > 1:
        scale = sum(found) / sum(wanted)
        assert stats.chisquare(found, np.array(wanted) * scale).pvalue > 1e-4
    else:
        assert found[0] >= len(tokens) - 5


# ---- rows of state ----


class Rig:
    """A sampler over slots that hold the given cases."""

    def __init__(self, cases: list[Case], dtype: torch.dtype = torch.float64) -> None:
        self.cases, self.dtype = cases, dtype
        self.requests = RequestState(len(cases), 32, 4, CPU)
        self.state = SamplingState.make(len(cases), CPU)
        self.sampler = Sampler(self.state, self.requests.tensors)
        staged = StagedWrites(CPU)
        for slot, case in enumerate(cases):
            tokens = [*case.prompt, *case.output]
            rules, num_prompt = case.rules(seed=slot), len(case.prompt)
            admission = Admission(slot, tokens, num_prompt, 0, rules, num_prompt + rules.max_tokens)
            self.requests.admit(staged, admission)
            self.state.admit(staged, slot, rules)
        staged.apply()

    def sample(self, slots: list[int] | None = None) -> torch.Tensor:
        """[n] token ids, one a case."""
        slots = list(range(len(self.cases))) if slots is None else slots
        logits = torch.tensor(np.stack([self.cases[s].logits for s in slots]), dtype=self.dtype)
        needs = SamplingNeeds.of(self.cases[s].rules() for s in slots)
        longest = max(len(self.cases[s].prompt) + len(self.cases[s].output) for s in slots)
        return self.draw(logits, torch.tensor(slots), needs, longest)

    def draw(
        self, logits: torch.Tensor, slot: torch.Tensor, needs: SamplingNeeds, max_seq_len: int
    ) -> torch.Tensor:
        """Tokens behind all that the slots know."""
        where = Positions(slot, self.requests.tensors.num_tokens[slot], max_seq_len)
        self.sampler.adjust_(logits, where, needs)
        return self.sampler.draw(logits, where, needs)


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, **options})


FILTERS: dict[str, Case] = {
    "plain": Case(sampling()),
    "cold": Case(sampling(temperature=0.5)),
    "hot": Case(sampling(temperature=2.0)),
    "top_k": Case(sampling(top_k=5)),
    "top_k 1": Case(sampling(top_k=1)),
    "top_k beyond": Case(sampling(top_k=99)),
    "top_p": Case(sampling(top_p=0.7)),
    "top_p tiny": Case(sampling(top_p=1e-6)),
    "min_p": Case(sampling(min_p=0.3)),
    "top_k top_p": Case(sampling(top_k=8, top_p=0.6)),
    "all filters": Case(sampling(temperature=1.4, top_k=10, top_p=0.9, min_p=0.1)),
    "repetition": Case(sampling(repetition_penalty=1.8)),
    "repetition below one": Case(sampling(repetition_penalty=0.6)),
    "presence": Case(sampling(presence_penalty=1.5)),
    "frequency": Case(sampling(frequency_penalty=0.9)),
    "negative penalties": Case(sampling(presence_penalty=-1.0, frequency_penalty=-0.5)),
    "all penalties": Case(
        sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
    ),
    "bias": Case(sampling(logit_bias={0: 2.0, 7: -1.5, 15: -100})),
    "min_tokens": Case(sampling(min_tokens=4), stop_ids=(0, 15, 14)),
    "min_tokens reached": Case(sampling(min_tokens=3), stop_ids=(0, 15, 14)),
    "bad word": Case(sampling(), bad_words=((15,), (0,))),
    "bad words": Case(sampling(), bad_words=((5, 15), (5, 5, 14), (4, 13), (1, 2, 3, 12))),
    "bad word over the prompt": Case(sampling(), output=(), bad_words=((3, 15), (2, 3, 14))),
    "bad word partly in prompt": Case(sampling(), output=(4,), bad_words=((3, 4, 15), (4, 14))),
    "together": Case(
        sampling(
            temperature=0.8,
            top_k=9,
            top_p=0.95,
            min_p=0.02,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            logit_bias={2: 3.0},
            min_tokens=9,
        ),
        stop_ids=(15,),
        bad_words=((5, 14),),
    ),
    "greedy": Case(sampling(temperature=0.0)),
    "greedy edited": Case(
        sampling(temperature=0.0, logit_bias={3: 5.0}, top_k=3, top_p=0.5), bad_words=((15,),)
    ),
    # The temperature decides what min_p drops.
    "min_p hot": Case(sampling(temperature=2.0, min_p=0.3)),
    "min_p cold": Case(sampling(temperature=0.5, min_p=0.3)),
}


def with_logits(case: Case, seed: int) -> Case:
    logits = np.random.default_rng(seed).normal(0, 1.2, VOCAB)
    return Case(case.params, case.prompt, case.output, case.stop_ids, case.bad_words, logits)


CASES = [with_logits(case, seed) for seed, case in enumerate(FILTERS.values())]
COPIES, ROUNDS = 40, 75


def draw_many(cases: list[Case], dtype: torch.dtype) -> np.ndarray:
    """[case, COPIES * ROUNDS] tokens, all cases in one batch, seeds renewed each round."""
    rig = Rig([case for case in cases for _ in range(COPIES)], dtype)
    rounds = []
    for number in range(ROUNDS):
        count = len(rig.cases)
        rig.state.seeds[:count] = torch.arange(count) + 1_000_003 * number
        rounds.append(rig.sample().view(len(cases), COPIES).numpy())
    return np.concatenate(rounds, axis=1)


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=["f32", "f64"])
def mixed_draws(request: pytest.FixtureRequest) -> np.ndarray:
    return draw_many(CASES, request.param)


@pytest.mark.parametrize("index", range(len(CASES)), ids=list(FILTERS))
def test_every_row_of_a_mixed_batch_follows_its_own_distribution(
    mixed_draws: np.ndarray, index: int
) -> None:
    check_distribution(mixed_draws[index], twin_probs(CASES[index]))


@pytest.mark.parametrize("index", range(len(CASES)), ids=list(FILTERS))
def test_a_row_alone_draws_what_it_draws_among_others(index: int) -> None:
    rig = Rig(CASES)
    mixed = rig.sample()
    assert rig.sample([index])[0] == mixed[index]


def test_row_order_does_not_matter() -> None:
    rig = Rig(CASES)
    mixed = rig.sample().tolist()
    for seed in range(5):
        order = random.Random(seed).sample(range(len(CASES)), len(CASES))
        assert rig.sample(order).tolist() == [mixed[slot] for slot in order]


def test_same_seed_same_token_and_other_seeds_differ() -> None:
    case = with_logits(Case(sampling()), 0)
    rig = Rig([case] * 64)
    rig.state.seeds[:64] = 5
    assert len(set(rig.sample().tolist())) == 1
    rig.state.seeds[:64] = torch.arange(64)
    first, second = rig.sample(), rig.sample()
    assert torch.equal(first, second)
    assert len(set(first.tolist())) > 5


def test_noise_depends_on_the_position() -> None:
    cases = [with_logits(Case(sampling(), output=(4,) * length), 0) for length in range(25)]
    rig = Rig(cases)
    rig.state.seeds[:25] = 5
    assert len(set(rig.sample().tolist())) > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_draw_follows_softmax(dtype: torch.dtype, spread: float) -> None:
    logits = np.random.default_rng(1).normal(0, spread, 50)
    count = 30_000
    rows = torch.tensor(logits, dtype=dtype).expand(count, -1)
    found = ops.draw(rows, torch.ones(count), torch.arange(count), torch.zeros(count).long())
    check_distribution(found.numpy(), softmax(logits))


def test_draws_at_successive_positions_follow_softmax() -> None:
    """One seed and many positions: what one long answer uses."""
    logits = np.random.default_rng(2).normal(0, 1, 20)
    count = 20_000
    rows = torch.tensor(logits).expand(count, -1)
    found = ops.draw(rows, torch.ones(count), torch.full((count,), 77), torch.arange(count))
    check_distribution(found.numpy(), softmax(logits))


def test_neighbouring_draws_are_independent() -> None:
    logits = np.zeros(4)
    count = 20_000
    rows = torch.tensor(logits).expand(count, -1)
    found = ops.draw(rows, torch.ones(count), torch.full((count,), 3), torch.arange(count)).numpy()
    table = np.zeros((4, 4))
    np.add.at(table, (found[:-1], found[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4


# ---- greedy ----


def test_greedy_rows_of_a_mixed_batch_take_the_argmax() -> None:
    rng = np.random.default_rng(5)
    rows = [rng.normal(0, 1, VOCAB) for _ in range(40)]
    cases = [Case(sampling(temperature=0.0), logits=row) for row in rows]
    noisy = [Case(sampling(top_k=2, top_p=0.5, min_p=0.9, presence_penalty=1), logits=rows[0])]
    found = Rig(cases + noisy).sample()[:40].tolist()
    assert found == [int(row.argmax()) for row in rows]


TIED = np.array([0.0, 3.0, 1.0, 3.0, 3.0, 3.0, *[-1.0] * (VOCAB - 6)])


def test_greedy_takes_the_first_of_equals() -> None:
    assert Rig([Case(sampling(temperature=0.0), logits=TIED)]).sample().tolist() == [1]


def test_greedy_takes_the_first_of_equals_in_any_batch() -> None:
    rows = [np.where(np.arange(VOCAB) >= VOCAB - count, 3.0, 0.0) for count in range(1, VOCAB)]
    greedy = [Case(sampling(temperature=0.0), logits=row) for row in rows]
    for top_k in (1, 2, 3):
        noisy = Case(sampling(top_k=top_k), logits=TIED)
        found = Rig([*greedy, noisy]).sample()[: len(rows)].tolist()
        assert found == [int(row.argmax()) for row in rows]


def test_ties_at_the_edge_of_top_k_do_not_depend_on_the_batch() -> None:
    case = Case(sampling(top_k=3), logits=np.zeros(VOCAB))
    for other in (5, 9, 0):
        rig = Rig([case] * 30 + [Case(sampling(top_k=other), logits=TIED)])
        rig.state.seeds[:30] = torch.arange(30)
        alone = rig.sample(list(range(30)))
        assert torch.equal(rig.sample()[:30], alone)


# ---- filters, exactly ----

LOGITS = st.lists(st.integers(-12, 12).map(lambda v: v / 4), min_size=VOCAB, max_size=VOCAB)


def filtered(logits: list[float], top_k: int, top_p: float, width: int) -> np.ndarray:
    rows = torch.tensor([logits], dtype=torch.float64)
    tensors = torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float32)
    ops.apply_top_k_top_p_(rows, *tensors, width)
    return rows[0].numpy()


def twin_count(values: np.ndarray, top_k: int, top_p: float) -> int:
    """How many survive: the fewest of the top_k that reach top_p."""
    best = np.sort(values)[::-1][: top_k or len(values)]
    probs = softmax(best)
    mass, count = 0.0, 0
    while count < len(best) and (count == 0 or mass < top_p):
        mass += probs[count]
        count += 1
    return count


@SETTINGS
@given(LOGITS, st.integers(0, VOCAB + 3), st.floats(0.01, 1.0), st.booleans())
def test_top_k_and_top_p_keep_what_the_twin_keeps(
    logits: list[float], top_k: int, top_p: float, narrow: bool
) -> None:
    width = top_k if narrow and top_k else VOCAB
    found = filtered(logits, top_k, top_p, width)
    values = np.array(logits)
    kept = np.isfinite(found)
    assert np.array_equal(found[kept], values[kept]), "survivors must not change"
    # A mass within rounding of top_p may fall on either side; of equals, any may stay.
    bounds = [twin_count(values, top_k, f32(top_p) + e) for e in (-1e-9, 1e-9)]
    assert bounds[0] <= kept.sum() <= bounds[1]
    assert np.array_equal(np.sort(values[kept]), np.sort(values)[VOCAB - kept.sum() :])


@SETTINGS
@given(LOGITS, st.floats(0.0, 1.0))
def test_min_p_keeps_what_the_twin_keeps(logits: list[float], min_p: float) -> None:
    rows = torch.tensor([logits], dtype=torch.float64)
    ops.apply_min_p_(rows, torch.tensor([min_p], dtype=torch.float32))
    ratio = np.exp(np.array(logits) - max(logits))
    kept = np.isfinite(rows[0].numpy())
    for token in range(VOCAB):
        if abs(ratio[token] - f32(min_p)) > 1e-9:
            assert kept[token] == (ratio[token] > f32(min_p))
    assert kept[int(np.argmax(logits))]


TOKENS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=5)


@SETTINGS
@given(
    logits=LOGITS,
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 3), max_size=6),
    words=WORDS,
    bias=st.dictionaries(TOKENS, st.integers(-8, 8).map(float), max_size=5),
    stops=st.sets(TOKENS, max_size=4),
    penalties=st.tuples(st.floats(0.5, 2.0), st.floats(-2, 2), st.floats(-2, 2)),
    min_tokens=st.integers(0, 6),
)
def test_edits_equal_the_twin(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    words: list[tuple[int, ...]],
    bias: dict[int, float],
    stops: set[int],
    penalties: tuple[float, float, float],
    min_tokens: int,
) -> None:
    repetition, presence, frequency = penalties
    params = sampling(
        logit_bias=bias,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        min_tokens=min_tokens,
    )
    case = Case(params, tuple(prompt), tuple(output), tuple(stops), tuple(words), np.array(logits))
    plain = Case(sampling(), logits=np.zeros(VOCAB))
    rig = Rig([plain, case])  # a neighbour that asked for nothing
    rows = torch.tensor(np.stack([plain.logits, case.logits]))
    needs = SamplingNeeds.of([plain.rules(), case.rules()])
    longest = max(6, len(prompt) + len(output))
    slot = torch.tensor([0, 1])
    where = Positions(slot, rig.requests.tensors.num_tokens[slot], longest)
    rig.sampler._edit_(rows, where, needs)
    assert torch.equal(rows[0], torch.zeros(VOCAB, dtype=rows.dtype))
    np.testing.assert_allclose(rows[1].numpy(), twin_logits(case), rtol=1e-12, atol=1e-12)


def test_top_p_of_one_keeps_everything() -> None:
    rows = torch.tensor([[30.0, 0.0, 0.0, 0.0]])
    ops.apply_top_k_top_p_(rows, torch.tensor([0]), torch.tensor([1.0]), 4)
    assert torch.isfinite(rows).all()


# ---- log-probabilities ----


@pytest.mark.parametrize("num_best", [0, 1, 5, VOCAB, VOCAB + 7])
def test_scores_are_log_softmax_of_the_raw_logits(num_best: int) -> None:
    raw = np.stack([with_logits(Case(sampling()), seed).logits for seed in range(6)])
    chosen = torch.tensor([0, 3, 1, 7, 2, 5])
    ids, scores, ranks = ops.score(torch.tensor(raw), chosen, num_best)
    shown = min(num_best, VOCAB)
    assert ids.shape == scores.shape == (6, 1 + shown)
    for row, logits in enumerate(raw):
        exact, token = np.log(softmax(logits)), int(chosen[row])
        assert int(ids[row, 0]) == token
        np.testing.assert_allclose(scores[row].numpy(), exact[ids[row].numpy()], rtol=1e-12)
        assert ids[row, 1:].tolist() == np.argsort(-exact)[:shown].tolist()
        assert int(ranks[row]) == 1 + int((exact > exact[token]).sum())


# ---- rows that no model should make ----

BROKEN = {
    "nan": np.full(VOCAB, np.nan),
    "one nan": np.where(np.arange(VOCAB) == 9, np.nan, 0.0),
    "all -inf": np.full(VOCAB, NEVER),
    "one +inf": np.where(np.arange(VOCAB) == 9, np.inf, 0.0),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_invariant_37_broken_rows_give_ids_in_range_and_harm_no_neighbour(kind: str) -> None:
    broken = [
        Case(case.params, case.prompt, case.output, case.stop_ids, case.bad_words, BROKEN[kind])
        for case in FILTERS.values()
    ]
    rig = Rig(CASES + broken)
    found = rig.sample()
    assert ((found >= 0) & (found < VOCAB)).all()
    healthy = list(range(len(CASES)))
    assert torch.equal(found[: len(CASES)], rig.sample(healthy))
    for index in range(len(CASES), len(rig.cases)):
        assert 0 <= int(rig.sample([index])[0]) < VOCAB


@pytest.mark.parametrize("kind", BROKEN)
def test_a_checked_draw_marks_rows_without_a_token(kind: str) -> None:
    broken = [
        Case(case.params, case.prompt, case.output, case.stop_ids, case.bad_words, BROKEN[kind])
        for case in FILTERS.values()
    ]
    rig = Rig(CASES + broken)
    logits = torch.tensor(np.stack([case.logits for case in rig.cases]), dtype=rig.dtype)
    slot = torch.arange(len(rig.cases))
    needs = SamplingNeeds.of(case.rules() for case in rig.cases)
    where = Positions(slot, rig.requests.tensors.num_tokens[slot], max_seq_len=32)
    rig.sampler.adjust_(logits, where, needs)
    found = rig.sampler.draw(logits, where, needs, checks=True)
    healthy, rest = found[: len(CASES)], found[len(CASES) :]
    assert torch.equal(healthy, rig.sampler.draw(logits, where, needs)[: len(CASES)])
    if kind in ("nan", "all -inf"):
        assert (rest == -1).all()
    elif kind == "one +inf":
        assert (rest >= 0).all()
    else:  # a filter may drop the only NaN
        assert (rest >= -1).all() and int(rest[list(FILTERS).index("plain")]) == -1


def test_places_behind_drafts_are_edited_as_if_the_drafts_were_accepted() -> None:
    """Several places of one slot in one call: each sees the drafts before it, and no others."""
    drafts = (5, 7, 7, 9)
    params = sampling(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        min_tokens=5,
        logit_bias={2: 1.5},
    )
    cases = [
        Case(params, output=(4, 5), stop_ids=(6,), bad_words=((7, 7, 8), (5, 7), (3,)))
        for _ in range(2)
    ]
    rig = Rig(cases)
    slots = rig.requests.tensors
    known = slots.num_tokens[:2].clone()
    for slot in range(2):
        slots.token_ids[slot, int(known[slot]) : int(known[slot]) + 4] = torch.tensor(drafts)
    slot = torch.tensor([0] * 5 + [1] * 5)
    where = Positions(slot, known[slot] + torch.arange(5).repeat(2), max_seq_len=9)
    rows = torch.tensor(np.stack([cases[0].logits] * 10))
    rig.sampler._edit_(rows, where, SamplingNeeds.of(case.rules() for case in cases))
    for row in range(10):
        seen = dataclasses.replace(cases[0], output=(4, 5, *drafts[: row % 5]))
        np.testing.assert_allclose(rows[row].numpy(), twin_logits(seen), rtol=1e-12, atol=1e-12)


def test_places_behind_drafts_draw_what_plain_decoding_would() -> None:
    """The noise of a place is keyed by its number in the text, not by how it was reached."""
    case = Case(sampling(temperature=0.9), output=(4,))
    longer = [Case(case.params, output=(4, *range(5, 5 + n))) for n in range(4)]
    needs = SamplingNeeds.of([case.rules()])
    rig = Rig([case])
    known = rig.requests.tensors.num_tokens[:1]
    where = Positions(torch.zeros(4, dtype=torch.int64), known + torch.arange(4), 16)
    logits = torch.tensor(np.stack([case.logits] * 4))
    rig.sampler.adjust_(logits, where, needs)
    found = rig.sampler.draw(logits, where, needs).tolist()
    assert found == [int(Rig([each]).sample()[0]) for each in longer]


def test_bad_words_beyond_the_batchs_length_bound() -> None:
    """A chunk's row knows more tokens than the batch's longest sequence: it must not fail."""
    long = Case(sampling(), prompt=tuple(range(1, 16)) * 2, output=(), bad_words=((3,),))
    rig = Rig([long])
    logits = torch.zeros(1, VOCAB, dtype=torch.float64)
    needs = SamplingNeeds.of([long.rules()])
    found = rig.draw(logits, torch.tensor([0]), needs, max_seq_len=8)
    assert 0 <= int(found[0]) < VOCAB


# ---- mutants ----


def presence_counts_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.History, "generated", ops.History.live)


def noise_without_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = ops.draw
    monkeypatch.setattr(ops, "draw", lambda x, t, s, p, **how: draw(x, t, s * 0, p, **how))


def temperature_after_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    temper, draw = ops.temper_, ops.draw

    def late(
        logits: torch.Tensor, t: torch.Tensor, *given: torch.Tensor, slot: torch.Tensor, **how: Any
    ) -> Any:
        temper(logits, t[slot])
        return draw(logits, t, *given, slot=slot, **how)

    monkeypatch.setattr(ops, "temper_", lambda logits, t: None)
    monkeypatch.setattr(ops, "draw", late)


def min_p_before_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    temper, apply = ops.temper_, ops.apply_min_p_
    temperatures: list[torch.Tensor] = []

    def early(logits: torch.Tensor, min_p: torch.Tensor) -> None:
        apply(logits, min_p)
        temper(logits, temperatures.pop())

    monkeypatch.setattr(ops, "temper_", lambda logits, t: temperatures.append(t))
    monkeypatch.setattr(ops, "apply_min_p_", early)


def too_little_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = ops.gumbel
    monkeypatch.setattr(ops, "gumbel", lambda *args: noise(*args) * 0.9)


def top_p_drops_the_crossing_token(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = ops.apply_top_k_top_p_
    monkeypatch.setattr(
        ops, "apply_top_k_top_p_", lambda x, k, p, width: apply(x, k, p * 0.8, width)
    )


def rows_of_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed_up(where: Positions) -> Positions:
        return dataclasses.replace(where, slot=where.slot.sort(descending=True).values)

    for name in ("adjust_", "draw"):
        method = getattr(Sampler, name)
        monkeypatch.setattr(
            Sampler,
            name,
            lambda self, logits, where, needs, m=method: m(self, logits, mixed_up(where), needs),
        )


@pytest.mark.parametrize(
    "mutate",
    [
        presence_counts_the_prompt,
        noise_without_seed,
        temperature_after_filters,
        min_p_before_temperature,
        too_little_noise,
        top_p_drops_the_crossing_token,
        rows_of_one_slot,
    ],
)
def test_distributions_notice_mutant(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    draws = draw_many(CASES, torch.float64)
    with pytest.raises(AssertionError):
        check_all(draws)


def check_all(draws: np.ndarray) -> None:
    for row, case in zip(draws, CASES, strict=True):
        check_distribution(row, twin_probs(case))
