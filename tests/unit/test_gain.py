"""What `--beside-plain` says of two engines' rounds."""

import pytest

from stoop.cli.gain import ROUNDS, decode_speed, measure, print_gain
from stoop.core.outputs import CompletionOutput, RequestOutput, RequestTimes


def answer(num_tokens: int, seconds: float, text: str = "same", wait: float = 5.0) -> RequestOutput:
    """`seconds` from the first token to the last, after a wait for the first."""
    times = RequestTimes(100.0, 100.0 + wait, 100.0 + wait + seconds)
    completion = CompletionOutput(0, text, list(range(num_tokens)), finish_reason="length")
    return RequestOutput("r", "p", [1], [completion], True, None, 0, times)


def test_speed_excludes_the_first_token() -> None:
    assert decode_speed([answer(11, 2.0)]) == pytest.approx(5.0)
    assert decode_speed([answer(11, 2.0, wait=0.1)]) == pytest.approx(5.0)
    assert decode_speed([answer(11, 2.0), answer(31, 4.0)]) == pytest.approx(10.0)


def test_a_round_that_was_run_counts() -> None:
    runs: list[float] = [3.0, 4.0, 5.0]
    first, speeds = measure(lambda: [answer(13, runs.pop(0))], [answer(13, 2.0)])
    assert len(speeds) == ROUNDS and speeds == pytest.approx([6.0, 4.0, 3.0])
    assert decode_speed(first) == pytest.approx(6.0) and runs == [5.0]


def test_the_median_counts_and_noise_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_gain([answer(9, 1.0)], [30.0, 20.0, 22.0], [answer(9, 1.0)], [10.0, 11.0, 11.0])
    told = capsys.readouterr().err
    assert (
        "22.0 tokens/s (after the first token), without drafts 11.0 tokens/s, the same answer"
        in told
    )
    assert "2.00x the speed of plain decoding, but runs of the same engine differ by 1.5x" in told
    print_gain([answer(9, 1.0)], [20.0, 22.0], [answer(9, 1.0, "other")], [10.0, 11.0])
    told = capsys.readouterr().err
    assert "a different answer: 2.00x the speed of plain decoding\n" in told
