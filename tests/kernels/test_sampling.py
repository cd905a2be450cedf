"""Noise, edits, filters, draws, scores and the judgement of drafts against torch."""

import itertools
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stoop.ops import random as random_reference
from stoop.ops import sampling as reference
from stoop.ops import verification as verification_reference
from stoop.ops.dispatch import Op
from stoop.ops.random import Purpose
from stoop.ops.sampling import NEVER, History
from support.kernel_compiling import MAX_SHARED, compile_launches

# The interpreter's: log(0), and an old way to call numpy.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
VOCABS = (50, 700, 4500)  # the last one has two parts
SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, 123456789012345678])
PLACES = torch.tensor([0, 7, 2**31 + 5, 100, 8191])
TEMPERATURE = torch.tensor([0.0, 1.0, 0.6, 0.0, 1.7])
SLOT = torch.tensor([3, 0, 6, 5, 1])  # of seven
NAN = float("nan")


def some_logits(vocab_size: int, kind: str = "plain", seed: int = 0, rows: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "banned":
        logits[:, 1::3] = NEVER
        logits[1, 5:] = NEVER
    if kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    return logits


def by_slot(rows: Tensor) -> Tensor:
    """A table that has `rows` at SLOT."""
    table = torch.zeros(7, *rows.shape[1:], dtype=rows.dtype)
    table[SLOT[: rows.shape[0]]] = rows
    return table


# ---- noise ----


@pytest.mark.interpreted
@pytest.mark.parametrize("purpose", list(Purpose))
def test_noise_is_the_references(purpose: Purpose) -> None:
    from stoop.ops.kernels import random as kernels

    for count in (1, 3, 1025):
        args = (SEEDS, PLACES, purpose, count)
        assert torch.equal(kernels.uniform(*args), random_reference.uniform(*args))
        gumbel = torch.empty(5, count)
        kernels.noise_(SEEDS, PLACES, int(purpose), True, gumbel)
        torch.testing.assert_close(gumbel, random_reference.gumbel(*args), rtol=5e-7, atol=5e-7)


# ---- the draw ----


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_argmax_is_torchs(vocab_size: int, dtype: torch.dtype) -> None:
    from stoop.ops.kernels import sampling as kernels

    for kind in ("plain", "ties", "zeros", "banned"):
        logits = some_logits(vocab_size, kind).to(dtype)
        assert torch.equal(kernels.greedy(logits), logits.argmax(dim=1)), kind
    logits[0] = NEVER
    logits[1, [40, 49]] = NAN
    logits[2] = NAN
    logits[3, -1] = float("inf")
    assert kernels.greedy(logits).tolist()[:4] == [0, 40, 0, vocab_size - 1]


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_draws_are_the_references(vocab_size: int, dtype: torch.dtype) -> None:
    from stoop.ops.kernels import sampling as kernels

    for kind in ("plain", "ties", "banned"):
        logits = some_logits(vocab_size, kind).to(dtype)
        for purpose in (Purpose.SAMPLE, Purpose.DRAFT):
            given = (TEMPERATURE, SEEDS, PLACES, purpose)
            plain = reference.draw(logits.float(), *given)
            assert torch.equal(kernels.draw(logits, *given), plain)
        tempered = logits.float().clone()
        reference.temper_(tempered, TEMPERATURE)
        expected = reference.draw(tempered, TEMPERATURE, SEEDS, PLACES)
        placed = (by_slot(TEMPERATURE), by_slot(SEEDS), PLACES, Purpose.SAMPLE, SLOT, True)
        assert torch.equal(kernels.draw(logits, *placed), expected)
        assert torch.equal(reference.draw(logits.float(), *placed), expected)


@pytest.mark.interpreted
@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("filters", [False, True])
def test_checked_draws_mark_rows_without_a_token(vocab_size: int, filters: bool) -> None:
    """NaN in the last part, NaN everywhere, nothing but -inf; +inf is a token like others."""
    from stoop.ops.kernels import sampling as kernels
    from stoop.ops.kernels import sampling_filters as filter_kernels

    for order in (0, 1, 2):  # each kind at several temperatures
        logits = some_logits(vocab_size)
        nan, one_nan, never, inf = [(order + row) % 5 for row in range(4)]
        logits[nan], logits[never] = NAN, NEVER
        logits[inf, 3] = float("inf")
        marked = {nan, never}
        if filters:  # a filter may drop the only NaN, and a row of NaN may become one of -inf
            given = (TEMPERATURE, torch.full((5,), 0.1), TOP_K.clamp(min=3), torch.full((5,), 0.9))
            plain = logits.clone()
            reference.filter_(plain, *given)
            filter_kernels.filter_(logits, *given)
        else:
            logits[one_nan, -1] = NAN
            marked |= {one_nan}
            plain = logits
            greedy = kernels.greedy(logits, True)
            assert torch.equal(greedy, reference.greedy.reference(logits, True))
            assert {row for row in range(5) if greedy[row] == -1} == marked
        draws = (TEMPERATURE, SEEDS, PLACES)
        found = kernels.draw(logits, *draws, checks=True)
        assert torch.equal(found, reference.draw.reference(plain, *draws, checks=True))
        assert {row for row in range(5) if found[row] == -1} == marked


@pytest.mark.interpreted
def test_a_row_of_nan_draws_a_token_that_exists() -> None:
    from stoop.ops.kernels import sampling as kernels

    logits = torch.full((5, 300), NAN)
    tokens = kernels.draw(logits, TEMPERATURE, SEEDS, PLACES)
    assert tokens.tolist() == [0] * 5


# ---- edits ----


def history(length: int, vocab_size: int) -> History:
    generator = torch.Generator().manual_seed(length)
    token_ids = torch.randint(min(vocab_size, 40), (5, length), generator=generator)
    num_prompt = torch.tensor([1, 2, length // 2, length - 1, 3])
    return History(token_ids, torch.tensor([1, 3, length, length - 1, length + 9]), num_prompt)


def tables(said: History) -> History:
    """The same by slot, with token ids as slots have them."""
    return History(by_slot(said.token_ids).int(), said.num_tokens, by_slot(said.num_prompt_tokens))


def check_edit(edit: Op[..., None], kind: str, *given: Tensor | History) -> None:
    """By row and by slot, the kernel against the reference in float32."""
    logits = some_logits(300, kind)
    expected = logits.clone()
    edit.reference(expected, *given)
    assert not torch.equal(expected, logits)
    by_row = logits.clone()
    edit.kernel(by_row, *given)
    torch.testing.assert_close(by_row, expected, rtol=1e-6, atol=1e-6)
    placed = [tables(x) if isinstance(x, History) else by_slot(x) for x in given]
    plain = logits.clone()
    edit.reference(plain, *placed, slot=SLOT)
    assert torch.equal(plain, expected)
    edit.kernel(logits, *placed, slot=SLOT)
    assert torch.equal(logits, by_row)


MASK_ROWS = torch.tensor([2, -1, 0, 6, 2])


def some_masks(vocab_size: int) -> Tensor:
    """[7, words] int32, every word random, the last bit of a word too."""
    generator = torch.Generator().manual_seed(vocab_size)
    words = torch.randint(-(2**31), 2**31, (7, -(-vocab_size // 32)), generator=generator)
    return words.to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 700])
def test_masks_forbid_bit_by_bit(vocab_size: int, dtype: torch.dtype) -> None:
    bits, logits = some_masks(vocab_size), some_logits(vocab_size).to(dtype)
    found = logits.clone()
    reference.apply_masks_.reference(found, bits, MASK_ROWS)
    for row, mask in enumerate(MASK_ROWS.tolist()):
        for token in range(vocab_size):
            allowed = mask < 0 or int(bits[mask, token // 32]) >> (token % 32) & 1
            assert found[row, token] == (logits[row, token] if allowed else NEVER)


@pytest.mark.interpreted
@pytest.mark.parametrize("vocab_size", [1, 31, 33, *VOCABS])
def test_masks_are_the_references(vocab_size: int) -> None:
    bits = some_masks(vocab_size)
    for rows in (MASK_ROWS, torch.full((5,), -1), MASK_ROWS.repeat(2)[::2]):
        logits = some_logits(vocab_size, "banned")
        expected = logits.clone()
        reference.apply_masks_.reference(expected, bits, rows)
        reference.apply_masks_.kernel(logits, bits, rows)
        assert torch.equal(logits, expected)


@pytest.mark.interpreted
def test_bias_is_added() -> None:
    ids = torch.stack([torch.randperm(300)[:20] for _ in range(5)])
    counts = torch.tensor([0, 1, 20, 7, 3])
    for kind in ("plain", "banned"):
        check_edit(reference.add_bias_, kind, ids, torch.randn(5, 20) * 9, counts)


@pytest.mark.interpreted
def test_stops_are_forbidden_until_min_tokens() -> None:
    ids, counts = torch.randint(300, (5, 12)), torch.tensor([12, 1, 0, 5, 3])
    least = torch.tensor([1, 1, 9, 1, 99])
    check_edit(reference.forbid_stops_, "plain", ids, counts, least, history(20, 300))


@pytest.mark.interpreted
def test_bad_words_are_forbidden() -> None:
    said = history(20, 300)
    words = torch.full((5, 6, 4), -1)
    words[:, 0, 3] = torch.arange(5) + 50  # of one token
    for row in range(5):
        end = min(int(said.num_tokens[row]), 20)
        words[row, 1, 1:3] = said.token_ids[row, end - 2 : end] if end > 1 else 7
        words[row, 1, 3] = 90 + row  # as it was said, partly in the prompt for some
        words[row, 2] = torch.tensor([39, 39, 39, 99])
    words[:, 3, 3] = 120  # of an earlier request, where the count leaves it out
    counts = torch.tensor([3, 4, 5, 0, 3])  # the fifth word has no tokens
    check_edit(reference.forbid_bad_words_, "plain", words, counts, said)


@pytest.mark.interpreted
@pytest.mark.parametrize("length", [4, 30, 2500])
def test_penalties_count_the_history(length: int) -> None:
    repetition = torch.tensor([1.0, 1.3, 1.0, 0.7, 1.8])
    presence = torch.tensor([0.0, 0.0, 0.6, -0.4, 0.2])
    frequency = torch.tensor([0.0, 0.0, 0.3, 0.0, -0.1])
    for kind in ("plain", "banned"):
        given = (history(length, 300), repetition, presence, frequency)
        check_edit(reference.penalise_, kind, *given)


# ---- filters ----

TOP_K = torch.tensor([0, 5, 1, 20, 1000])
TOP_P = torch.tensor([1.0, 0.9137, 0.7071, 1.0, 0.3033])  # no share of equal tokens is just this
MIN_P = torch.tensor([0.0, 0.1, 0.5, 0.01, 1.0])


def filtered(logits: Tensor, *given: Tensor | None) -> Tensor:
    """The reference in float64: temperature, min-p, top-k and top-p."""
    temperature, min_p, top_k, top_p = given
    exact = logits.double()
    if temperature is not None:
        reference.temper_(exact, temperature)
        exact = exact.float().double()  # ties are those of float32
    if min_p is not None:
        reference.apply_min_p_(exact, min_p)
    if top_k is not None and top_p is not None:
        reference.apply_top_k_top_p_(exact, top_k, top_p, logits.shape[1])
    return exact.float()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("vocab_size", "kind"),
    itertools.product(VOCABS, ("plain", "ties", "zeros", "banned"))
    if EVERY
    else [(50, "zeros"), (50, "ties"), (700, "plain"), (700, "banned"), (4500, "ties")],
)
def test_top_k_and_top_p_keep_what_the_reference_keeps(vocab_size: int, kind: str) -> None:
    from stoop.ops.kernels import sampling_filters as kernels

    settings = [
        (TOP_K, TOP_P),
        (TOP_K.flip(0), TOP_P.roll(1)),
        (TOP_K * 0, TOP_P.clamp(max=0.9871)),
    ]
    for seed, (top_k, top_p) in enumerate(settings):
        logits = some_logits(vocab_size, kind, seed)
        found = logits.clone()
        kernels.filter_(found, top_k=top_k, top_p=top_p)
        assert torch.equal(found, filtered(logits, None, None, top_k, top_p))


@pytest.mark.interpreted
@pytest.mark.parametrize("top_p", [1e-9, 0.25, 0.5, 1 - 1e-6, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 63, 64, 65])
def test_equal_logits_stay_from_the_first_on(top_k: int, top_p: float) -> None:
    from stoop.ops.kernels import sampling_filters as kernels

    logits = torch.zeros(1, 64)
    given = torch.tensor([top_k]), torch.tensor([top_p])
    expected = filtered(logits, None, None, *given)
    kernels.filter_(logits, None, None, *given)
    assert torch.equal(logits, expected)


@pytest.mark.interpreted
def test_temperature_and_min_p_alone() -> None:
    from stoop.ops.kernels import sampling_filters as kernels

    for kind in ("plain", "ties", "banned"):
        logits = some_logits(700, kind)
        expected = logits.clone()
        reference.temper_(expected, TEMPERATURE)
        found = logits.clone()
        kernels.filter_(found, TEMPERATURE)
        assert torch.equal(found, expected)
        kernels.filter_(found, min_p=by_slot(MIN_P), slot=SLOT)
        reference.apply_min_p_(expected, MIN_P)
        assert torch.equal(found, expected)


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["plain", "ties", "banned"])
def test_all_filters_at_once(kind: str) -> None:
    from stoop.ops.kernels import sampling_filters as kernels

    for seed in range(2):
        logits = some_logits(700, kind, seed)
        given = (TEMPERATURE.roll(seed), MIN_P, TOP_K.roll(seed), TOP_P)
        found, alone, placed = logits.clone(), logits.clone(), logits.clone()
        kernels.filter_(found, *given)
        torch.testing.assert_close(found, filtered(logits, *given), rtol=1e-6, atol=0)
        kernels.filter_(placed, *map(by_slot, given), slot=SLOT)
        assert torch.equal(placed, found)
        plain, by_row = logits.clone(), logits.clone()
        reference.filter_(plain, *map(by_slot, given), slot=SLOT)
        reference.filter_(by_row, *given)
        assert torch.equal(plain, by_row)
        for row in range(5):
            one = slice(row, row + 1)
            kernels.filter_(alone[one], *(each[one] for each in given))
        assert torch.equal(alone, found)


@pytest.mark.interpreted
def test_rows_that_are_no_distribution_stay() -> None:
    from stoop.ops.kernels import sampling_filters as kernels

    logits = some_logits(300)
    logits[0] = NEVER
    logits[1] = NAN
    logits[2, 4] = float("inf")
    before = logits.clone()
    kernels.filter_(logits, None, MIN_P, TOP_K.clamp(min=3), TOP_P)
    assert torch.equal(logits[:3].nan_to_num(7.0), before[:3].nan_to_num(7.0))


# ---- drafts ----


@pytest.mark.interpreted
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_drafts_are_judged_as_by_the_reference(vocab_size: int) -> None:
    from stoop.ops.kernels import verification as kernels

    K = 3
    logits = torch.stack([some_logits(vocab_size, seed=j) for j in range(K + 1)], dim=1)
    logits[0, :, ::3] = NEVER
    draft_logits = logits[:, :K] + torch.stack(
        [some_logits(vocab_size, seed=9 + j) / 3 for j in range(K)], dim=1
    )
    draft_logits[3] = logits[3, :K]  # nothing is left of it
    logits[3, :, 11] = draft_logits[3, :, 11] = NEVER
    drafts = reference.draw(
        draft_logits.flatten(0, 1),
        torch.ones(5 * K),
        SEEDS.repeat_interleave(K),
        (PLACES[:, None] + torch.arange(K)).flatten(),
        Purpose.DRAFT,
    ).view(5, K)
    drafts[1] = torch.arange(K)
    drafts[3, 1] = 11  # impossible for both: refused
    probs, draft_probs = logits[:, :K].softmax(dim=2), draft_logits.softmax(dim=2)
    accepts = verification_reference.accept_by_ratio(probs, draft_probs, drafts, SEEDS, PLACES)
    redrawn = verification_reference.draw_residual(probs, draft_probs, SEEDS, PLACES)
    assert accepts.any() and not accepts.all()
    for placed in (False, True):
        given = (by_slot(draft_logits), by_slot(SEEDS), SLOT) if placed else None
        table, seeds, slot = given or (draft_logits, SEEDS, None)
        found = kernels.judge_drafts(logits, table, drafts, seeds, PLACES, slot)
        assert torch.equal(found[0], accepts)
        assert torch.equal(found[1], torch.where(accepts, 0, redrawn))


# ---- scores ----


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_scores_are_the_references(vocab_size: int, dtype: torch.dtype) -> None:
    from stoop.ops.kernels import sampling as kernels

    logits = some_logits(vocab_size).to(dtype)
    logits[1, ::2] = NEVER
    chosen = torch.tensor([3, 4, int(logits[2].argmax()), 0, vocab_size - 1])
    for num_best in (0, 4):
        ids, logprobs, rank = kernels.score(logits, chosen, num_best)
        expected = reference.score(logits.float(), chosen, num_best)
        assert torch.equal(rank, expected[2])
        torch.testing.assert_close(logprobs, expected[1], rtol=1e-6, atol=2e-6)
        assert torch.equal(logits.gather(1, ids), logits.gather(1, expected[0]))


# ---- the compiler ----


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def check_compiled(launch: Callable[[], object], count: int) -> None:
    with compile_launches() as found:
        launch()
    assert len(found) == count
    for compiled in found:
        print(compiled)
        assert compiled.shared <= MAX_SHARED and compiled.spilled == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [49152, 128256])
def test_draws_and_scores_compile_for_an_h200(vocab_size: int, dtype: torch.dtype) -> None:
    from stoop.ops.kernels import sampling as kernels
    from stoop.ops.kernels import verification

    logits, temperature = torch.zeros(4, vocab_size, dtype=dtype), torch.zeros(4)
    check_compiled(lambda: kernels.greedy(logits), 2)
    check_compiled(lambda: kernels.draw(logits, temperature, ints(4), ints(4)), 2)
    check_compiled(
        lambda: kernels.draw(logits, temperature, ints(4), ints(4), slot=ints(4), tempers=True), 2
    )
    check_compiled(lambda: kernels.score(logits, ints(4), 5), 2)
    rows = logits.view(1, 4, vocab_size)
    given = (rows, rows[:, :3].float(), ints(1, 3), ints(1), ints(1), ints(1))
    check_compiled(lambda: verification.judge_drafts(*given), 4)


@pytest.mark.parametrize("vocab_size", [49152, 128256])
def test_edits_and_filters_compile_for_an_h200(vocab_size: int) -> None:
    from stoop.ops.kernels import random, sampling_edits, sampling_filters

    logits, floats, slot = torch.zeros(4, vocab_size), torch.zeros(4), ints(4)
    said = History(torch.zeros(4, 8192, dtype=torch.int32), slot, slot)

    bits = torch.zeros(16, vocab_size // 32, dtype=torch.int32)

    def edits() -> None:
        sampling_edits.apply_masks_(logits, bits, slot)
        sampling_edits.add_bias_(logits, ints(4, 512), torch.zeros(4, 512), slot, slot=slot)
        sampling_edits.forbid_stops_(logits, ints(4, 128), slot, slot, said, slot=slot)
        sampling_edits.forbid_bad_words_(logits, ints(4, 128, 16), slot, said, slot=slot)
        sampling_edits.penalise_(logits, said, floats, floats, floats, slot=slot)

    check_compiled(edits, 5)
    check_compiled(
        lambda: sampling_filters.filter_(logits, floats, floats, slot, floats, slot=slot), 5
    )
    check_compiled(lambda: sampling_filters.filter_(logits, floats), 1)
    check_compiled(lambda: sampling_filters.filter_(logits, min_p=floats), 3)
    check_compiled(lambda: sampling_filters.filter_(logits, top_k=slot, top_p=floats), 5)
    check_compiled(lambda: random.noise_(slot, slot, int(Purpose.SAMPLE), True, logits), 1)
    check_compiled(lambda: random.uniform(slot, slot, Purpose.SAMPLE, vocab_size), 1)
