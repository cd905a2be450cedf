"""The counter-based generator: known answers, independent streams, exact distributions."""

import numpy as np
import pytest
import torch
from scipy import stats

from stoop.ops.random import Purpose, gumbel, philox, uniform

ONES = 0xFFFFFFFF


def words(counter: list[int], key: list[int]) -> list[str]:
    tensors = [torch.tensor([v]) for v in counter + key]
    out = philox(tuple(tensors[:4]), (tensors[4], tensors[5]))
    return [f"{int(word):08x}" for word in out]


KNOWN = [  # of the Random123 distribution, philox4x32 with ten rounds
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([ONES] * 4, [ONES] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], answer: str) -> None:
    assert words(counter, key) == answer.split()


def numbers(seed: int, position: int, purpose: Purpose = Purpose.SAMPLE, count: int = 4096):
    return uniform(torch.tensor([seed]), torch.tensor([position]), purpose, count)[0].numpy()


def test_numbers_follow_the_counter_layout() -> None:
    """Number j is word j % 4 of counter (j // 4, position, purpose, 0) under the seed's halves."""
    seed, position = 0x1234567_89ABCDEF, 17
    found = numbers(seed, position, Purpose.ACCEPT, 10)
    for j in range(10):
        key = [seed & ONES, seed >> 32]
        word = int(words([j // 4, position, int(Purpose.ACCEPT), 0], key)[j % 4], 16)
        assert found[j] == pytest.approx((word + 0.5) / 2**32, rel=1e-6)


STREAMS = {
    "base": (1, 5, Purpose.SAMPLE),
    "position": (1, 6, Purpose.SAMPLE),
    "seed": (2, 5, Purpose.SAMPLE),
    "high half": (1 + 2**32, 5, Purpose.SAMPLE),
    "negative": (-1, 5, Purpose.SAMPLE),
    "draft": (1, 5, Purpose.DRAFT),
    "accept": (1, 5, Purpose.ACCEPT),
    "resample": (1, 5, Purpose.RESAMPLE),
    "swapped": (5, 1, Purpose.SAMPLE),
}


def test_streams_are_independent() -> None:
    rows = np.stack([numbers(*stream) for stream in STREAMS.values()])
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 0.06  # 4096 numbers: four standard errors
    for i in range(len(rows)):
        for j in range(i):
            assert (rows[i] == rows[j]).mean() < 0.001


def test_neighbouring_positions_and_lags_are_uncorrelated() -> None:
    positions = torch.arange(64)
    rows = uniform(torch.full((64,), 9), positions, Purpose.SAMPLE, 256).numpy()
    assert abs(np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(rows[:, :-1].ravel(), rows[:, 1:].ravel())[0, 1]) < 0.03


def test_a_row_depends_on_its_own_key_alone() -> None:
    seeds, positions = torch.tensor([4, 5, 6]), torch.tensor([7, 8, 9])
    together = uniform(seeds, positions, Purpose.SAMPLE, 33)
    for row in (2, 0, 1):
        alone = uniform(seeds[row : row + 1], positions[row : row + 1], Purpose.SAMPLE, 33)
        assert torch.equal(together[row], alone[0])
    wider = uniform(seeds, positions, Purpose.SAMPLE, 50)  # a longer row starts the same
    assert torch.equal(wider[:, :33], together)


def test_uniform_distribution_and_open_ends() -> None:
    values = numbers(3, 0, count=200_000)
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    assert values.min() > 0.0 and values.max() < 1.0


def test_gumbel_distribution() -> None:
    values = gumbel(torch.tensor([3]), torch.tensor([0]), Purpose.SAMPLE, 200_000)[0].numpy()
    assert np.isfinite(values).all()
    assert stats.kstest(values, "gumbel_r").pvalue > 1e-4


def test_extreme_words_make_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    import stoop.ops.random as module

    for word in (0, ONES):
        fixed = (torch.full((1, 2), word),) * 4
        monkeypatch.setattr(module, "philox", lambda counter, key, fixed=fixed: fixed)
        noise = gumbel(torch.tensor([0]), torch.tensor([0]), Purpose.SAMPLE, 8)
        assert torch.isfinite(noise).all()
