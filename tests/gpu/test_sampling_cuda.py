"""Kernels of sampling at full vocabulary on a CUDA device, against torch; and what they cost."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stoop.ops import random as random_reference
from stoop.ops import sampling as reference
from stoop.ops import verification as verification_reference
from stoop.ops.random import Purpose
from stoop.ops.sampling import NEVER, History

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABS = (49152, 128256)
ROWS = 8


@pytest.fixture(autouse=True)
def _references_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would be the kernels that they are compared with."""
    monkeypatch.setattr("stoop.ops.kernels.choice.has_kernels", lambda device: False)


def some_logits(vocab_size: int, rows: int = ROWS, seed: int = 0, ties: bool = False) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator, device="cuda") * 3
    return (logits * 4).round() / 4 if ties else logits


def seeds_and_places(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    seeds = torch.arange(rows, device="cuda") * 0x9E3779B97F4A7C1
    return seeds - 5, torch.arange(rows, device="cuda") * 999


def floats(*values: float) -> Tensor:
    return torch.tensor(values, device="cuda")


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_noise_is_the_references(vocab_size: int) -> None:
    from stoop.ops.kernels import random as kernels

    args = (*seeds_and_places(), Purpose.DRAFT, vocab_size)
    assert torch.equal(kernels.uniform(*args), random_reference.uniform(*args))
    ours = torch.empty(ROWS, vocab_size, device="cuda")
    kernels.noise_(args[0], args[1], int(Purpose.DRAFT), True, ours)
    torch.testing.assert_close(ours, random_reference.gumbel(*args), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_draws_are_the_references(vocab_size: int, dtype: torch.dtype) -> None:
    from stoop.ops.kernels import sampling as kernels

    logits = some_logits(vocab_size, 64).to(dtype)
    logits[3, 1000:] = NEVER
    logits[4, [70, 40000]] = float("nan")
    first = torch.where(logits.isnan(), float("inf"), logits)  # torch's on CUDA may differ in ties
    top = first == first.amax(dim=1, keepdim=True)
    assert torch.equal(kernels.greedy(logits), top.int().argmax(dim=1))
    logits[4] = 0.0
    temperature = torch.arange(64, device="cuda") % 3 / 2.0
    seeds, places = seeds_and_places(64)
    chosen = kernels.draw(logits, temperature, seeds, places, tempers=True)
    scores = logits.float()
    if dtype == torch.float32:
        scores = scores.clone()
    reference.temper_(scores, temperature)
    noise = random_reference.gumbel(seeds, places, Purpose.SAMPLE, vocab_size)
    scores = scores.double() + noise * (temperature > 0)[:, None]
    lost = scores.amax(dim=1) - scores.gather(1, chosen[:, None])[:, 0]
    assert lost.max() <= 4e-6  # a near tie may fall either way


@pytest.mark.parametrize("size", [12288, 32000, 49152])
def test_coupled_drafts_are_what_the_target_draws(size: int) -> None:
    """Of logits that are nowhere else, whatever the draft vocabulary leaves out."""
    from stoop.ops.kernels import sampling
    from stoop.ops.kernels.coupling import draw_as_target_

    logits = some_logits(size, 64)
    generator = torch.Generator().manual_seed(size)
    ids = torch.randperm(60_000, generator=generator)[:size].sort().values.cuda()
    d2t = ids - torch.arange(size, device="cuda")
    temperature = torch.arange(64, device="cuda") % 3 / 2.0
    seeds, places = seeds_and_places(64)
    slot = torch.arange(63, -1, -1, device="cuda")
    packed, found = sampling.draw_buffers(logits)
    drafts = torch.full_like(places, 2)
    draw_as_target_(
        logits, temperature, seeds, places - drafts, drafts, d2t, slot, True, packed, found
    )
    target = torch.full((64, 60_000), NEVER, device="cuda")
    target[:, ids] = logits
    given = (temperature[slot], seeds[slot], places[slot])
    wanted = sampling.draw(target, *given, tempers=True)
    assert torch.equal(found + d2t[found], wanted)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_filters_keep_what_the_reference_keeps(vocab_size: int, ties: bool) -> None:
    from stoop.ops.kernels import sampling_filters as kernels

    logits = some_logits(vocab_size, ties=ties)
    logits[5, ::2] = NEVER
    temperature = floats(1, 0.7, 1, 1.5, 0, 1, 3, 0.2)
    min_p = floats(0, 0.05, 0, 0, 0, 0, 0, 0.001)
    top_k = torch.tensor([0, 50, 1000, 0, 0, 60000, 0, 5], device="cuda")
    top_p = floats(1, 1, 0.9137, 0.95137, 1, 1, 0.3033, 0.61)
    found, exact = logits.clone(), logits.clone()
    kernels.filter_(found, temperature, min_p, top_k, top_p)
    reference.temper_(exact, temperature)
    assert torch.equal(found[found > NEVER], exact[found > NEVER])
    assert torch.equal(found[[0, 4]], exact[[0, 4]])
    exact = exact.double()
    reference.apply_min_p_(exact, min_p)
    reference.apply_top_k_top_p_(exact, top_k, top_p, vocab_size)
    ours, theirs = (found > NEVER).sum(dim=1), (exact > NEVER).sum(dim=1)
    print(ours.tolist(), theirs.tolist())
    for row in range(ROWS):
        if top_p[row] == 1:
            assert torch.equal(found[row].double(), exact[row])
        # A mass that is summed in another order may end a few tokens of the tail earlier or later.
        apart = (found[row] > NEVER) != (exact[row] > NEVER)
        assert logits[row].double().softmax(0)[apart].sum() < 2e-6


@pytest.mark.parametrize("length", [100, 8192])
def test_edits_are_the_references(length: int) -> None:
    from stoop.ops.kernels import sampling_edits as kernels

    vocab_size, slots = 128256, 20
    slot = torch.randperm(slots)[:ROWS].cuda()
    table = torch.randint(500, (slots, length), device="cuda", dtype=torch.int32)
    table[:, ::2] += 70000
    num_tokens = torch.randint(1, length + 1, (ROWS,), device="cuda")
    num_prompt = torch.randint(1, length // 2, (slots,), device="cuda")
    repetition, presence, frequency = (torch.rand(3, slots) + 0.5).cuda()
    repetition[slot[0]], presence[slot[0]], frequency[slot[0]] = 1, 0, 0
    logits = some_logits(vocab_size)
    expected = logits.clone()
    gathered = History(table[slot].long(), num_tokens, num_prompt[slot])
    reference.penalise_(expected, gathered, repetition[slot], presence[slot], frequency[slot])
    said = History(table, num_tokens, num_prompt)
    again = logits.clone()
    kernels.penalise_(logits, said, repetition, presence, frequency, slot)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    kernels.penalise_(again, said, repetition, presence, frequency, slot)
    assert torch.equal(again, logits)
    ids = torch.stack([torch.randperm(vocab_size)[:512] for _ in range(slots)]).cuda()
    bias, counts = torch.randn(slots, 512).cuda(), torch.randint(513, (slots,)).cuda()
    expected = logits.clone()
    reference.add_bias_(expected, ids[slot], bias[slot], counts[slot])
    kernels.add_bias_(logits, ids, bias, counts, slot)
    assert torch.equal(logits, expected)
    least = torch.randint(length, (slots,)).cuda()
    reference.forbid_stops_(expected, ids[slot], counts[slot], least[slot], gathered)
    kernels.forbid_stops_(logits, ids, counts, least, said, slot)
    words = torch.full((slots, 128, 16), -1, device="cuda")
    words[:, :64, 15] = ids[:, :64]
    words[:, :32, 14] = torch.randint(2, (slots, 32)).cuda() * 70000
    counts = torch.randint(65, (slots,)).cuda()
    reference.forbid_bad_words_(expected, words[slot], counts[slot], gathered)
    kernels.forbid_bad_words_(logits, words, counts, said, slot)
    assert torch.equal(logits, expected)


def test_drafts_are_judged_as_by_the_reference() -> None:
    from stoop.ops.kernels import verification as kernels

    K, n, vocab_size = 3, 32, 128256
    logits = some_logits(vocab_size, n * (K + 1)).view(n, K + 1, vocab_size)
    draft_logits = logits[:, :K] + some_logits(vocab_size, n * K, 1).view(n, K, vocab_size) / 3
    seeds, places = seeds_and_places(n)
    drafts = torch.stack(
        [
            reference.draw(draft_logits[:, j], seeds * 0 + 1, seeds, places + j, Purpose.DRAFT)
            for j in range(K)
        ],
        dim=1,
    )
    probs, draft_probs = logits[:, :K].softmax(dim=2), draft_logits.softmax(dim=2)
    accepts = verification_reference.accept_by_ratio(probs, draft_probs, drafts, seeds, places)
    redrawn = verification_reference.draw_residual(probs, draft_probs, seeds, places)
    found, tokens = kernels.judge_drafts(logits, draft_logits, drafts, seeds, places)
    assert 0.2 < accepts.float().mean() < 0.95
    assert (found != accepts).float().mean() < 0.03
    refused = ~found & ~accepts
    assert (tokens[refused] != redrawn[refused]).float().mean() < 0.05
    residual = (probs - draft_probs).gather(2, tokens[:, :, None])[:, :, 0]
    assert bool((residual[refused] > -1e-9).all())


def test_scores_are_the_references() -> None:
    from stoop.ops.kernels import sampling as kernels

    logits = some_logits(128256)
    chosen = torch.randint(128256, (ROWS,), device="cuda")
    found, expected = kernels.score(logits, chosen, 5), reference.score(logits, chosen, 5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert (found[2] - expected[2]).abs().max() <= 5  # log-probabilities tie where logits do not
    assert torch.equal(found[0], expected[0])


def milliseconds(work: Callable[[], object]) -> float:
    import triton

    return float(triton.testing.do_bench_cudagraph(work, rep=10))


@pytest.mark.parametrize("rows", [1, 4, 32, 128])
def test_what_sampling_costs(rows: int) -> None:
    """In graphs, so it also shows that all of it can be captured; filters include a copy."""
    from stoop.ops.kernels import sampling, sampling_edits, sampling_filters

    vocab_size = 128256
    logits, work = some_logits(vocab_size, rows), torch.empty(rows, vocab_size, device="cuda")
    temperature = torch.full((rows,), 0.8, device="cuda")
    seeds, places = seeds_and_places(rows)
    min_p, none = temperature * 0 + 0.01, temperature * 0
    k50, k0 = seeds * 0 + 50, seeds * 0
    p90, p1 = none + 0.9, none + 1
    table = torch.randint(vocab_size, (rows, 8192), device="cuda", dtype=torch.int32)
    said = History(table, seeds * 0 + 8192, seeds * 0 + 100)

    # As a model's: most of the mass on few tokens.
    order = logits.argsort(dim=1).argsort(dim=1)
    peaked = logits / 6 - 1.3 * torch.log1p(order.float())

    def filters(source: Tensor, *given: Tensor | None) -> Callable[[], None]:
        return lambda: (work.copy_(source), sampling_filters.filter_(work, *given))[1]

    def slow() -> None:
        work.copy_(logits)
        reference.temper_(work, temperature)
        reference.apply_min_p_(work, min_p)
        reference.apply_top_k_top_p_(work, k50, p90, vocab_size)

    cases: dict[str, Callable[[], object]] = {
        "copy": lambda: work.copy_(logits),
        "argmax": lambda: sampling.greedy(logits),
        "argmax, torch": lambda: logits.argmax(dim=1),
        "draw": lambda: sampling.draw(logits, temperature, seeds, places, tempers=True),
        "draw, torch": lambda: reference.draw(logits, temperature, seeds, places),
        "no filter": filters(logits, temperature, none, k0, p1),
        "min_p": filters(logits, temperature, min_p),
        "top_k 50": filters(logits, temperature, None, k50, p1),
        "top_p 0.9": filters(logits, temperature, None, k0, p90),
        "top_p 0.9, peaked": filters(peaked, temperature, None, k0, p90),
        "all filters": filters(logits, temperature, min_p, k50, p90),
        "all filters, peaked": filters(peaked, temperature, min_p, k50, p90),
        "all filters, torch": slow,
        "penalties of 8192": lambda: sampling_edits.penalise_(work, said, p90, none, none),
    }
    times = {name: milliseconds(case) for name, case in cases.items()}
    for name, time in times.items():
        print(f"{rows:4} rows, {name}: {time * 1000:.1f} us")
    for name in ("argmax", "draw", "all filters"):
        assert times[name] < times[f"{name}, torch"]
