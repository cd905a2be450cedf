"""The speedup that drafts give one answer: decode speed with and without them, over rounds."""

import statistics
import sys
from collections.abc import Callable, Sequence

from stoop.core.outputs import RequestOutput

ROUNDS = 3  # per engine
MAX_SPREAD = 1.4  # between rounds of one engine: above it, the machine is busy with other work

Round = Callable[[], list[RequestOutput]]


def decode_speed(outputs: Sequence[RequestOutput]) -> float:
    """Tokens per second after the first token, since drafts do not speed up the prompt."""
    num_answers = sum(len(output.outputs) for output in outputs)
    num_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    first = min(output.times.first_token or output.times.arrival for output in outputs)
    last = max(output.times.finished or 0.0 for output in outputs)
    return (num_tokens - num_answers) / max(last - first, 1e-9)


def measure(
    run: Round, known: Sequence[RequestOutput] = ()
) -> tuple[list[RequestOutput], list[float]]:
    """Return the answer and its speed in every round. known: the first round's, if already run"""
    rounds = [list(known)] if known else []
    while len(rounds) < ROUNDS:
        rounds.append(run())
    return rounds[0], [decode_speed(each) for each in rounds]


def print_gain(
    outputs: Sequence[RequestOutput],
    speeds: Sequence[float],
    plain: Sequence[RequestOutput],
    plain_speeds: Sequence[float],
) -> None:
    """Print both decode speeds and their ratio to standard error."""
    texts = [[[a.text for a in each.outputs] for each in some] for some in (outputs, plain)]
    equal = "the same answer" if texts[0] == texts[1] else "a different answer"
    speed, plain_speed = statistics.median(speeds), statistics.median(plain_speeds)
    line = (
        f"decode {speed:.1f} tokens/s (after the first token), without drafts "
        f"{plain_speed:.1f} tokens/s, {equal}: {speed / max(plain_speed, 1e-9):.2f}x the speed of "
        "plain decoding"
    )
    spread = max(max(some) / max(min(some), 1e-9) for some in (speeds, plain_speeds))
    if spread > MAX_SPREAD:
        line += f", but runs of the same engine differ by {spread:.1f}x: the machine is not idle"
    print(line, file=sys.stderr)
