"""The comparison of answers tells near ties from faults."""

from stoop.check.answers import compare
from stoop.core.outputs import CompletionOutput, Logprob


def answer(*steps: tuple[int, float]) -> CompletionOutput:
    """Tokens with the lead of each over the second best, token 99."""
    scores = [{token: Logprob(0.0), 99: Logprob(-lead)} for token, lead in steps]
    return CompletionOutput(0, "", [token for token, _ in steps], logprobs=scores)


def test_equal_answers_have_noise_alone() -> None:
    found = compare([answer((1, 2.0), (2, 3.0))], [answer((1, 2.25), (2, 2.9))], 1)
    assert (found.num_equal, found.num_tokens, found.noise) == (1, 2, 0.25)
    assert not found.divergences


def test_a_divergence_within_noise_is_explained() -> None:
    ours = answer((1, 2.0), (2, 0.125), (3, 9.0))
    theirs = answer((1, 2.25), (4, 0.1), (5, 1.0))
    found = compare([ours], [theirs], 1)
    (each,) = found.divergences
    assert (each.position, each.gap, found.num_tokens) == (1, 0.125, 1)
    assert not found.unexplained


def test_a_divergence_at_a_clear_lead_is_a_fault() -> None:
    found = compare([answer((1, 2.0), (2, 1.5))], [answer((1, 2.25), (4, 1.5))], 1)
    assert [each.gap for each in found.unexplained] == [1.5]


def test_an_answer_that_ends_early_is_a_fault() -> None:
    found = compare([answer((1, 2.0))], [answer((1, 2.0), (2, 1.0))], 1)
    assert len(found.unexplained) == 1
