"""What steps take and yield, as the policy estimates it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoop.engine.draft_estimates import PRIOR, USUAL, Acceptance, expected_tokens, usual_rates
from stoop.engine.step_costs import FIRST_TRY, LAST_TRY, LEARNED, StepTimes, TrialOfFewer


def notes(trial: TrialOfFewer, count: int, excess: float, times: int) -> None:
    for _ in range(times):
        trial.note(count, excess)


def test_a_trial_finds_what_graphs_do_not_tell() -> None:
    trial = TrialOfFewer()
    notes(trial, 3, 0.010, FIRST_TRY)
    assert not trial.begin(3, FIRST_TRY - 1, graph=0.004)
    assert trial.begin(3, 1, graph=0.004) and trial.left == LEARNED
    notes(trial, 1, 0.002, LEARNED)
    assert trial.go_on(1, LEARNED - 1, graph=0.004)
    assert not trial.go_on(1, 1, graph=0.004)
    assert not trial.held, "a second one must agree"
    notes(trial, 3, 0.011, LEARNED - 1)
    assert not trial.begin(3, LEARNED - 1, graph=0.004)
    notes(trial, 3, 0.011, 1)
    assert trial.begin(3, 1, graph=0.004)
    notes(trial, 1, 0.003, LEARNED)
    assert not trial.go_on(1, LEARNED, graph=0.004)
    assert trial.held == {3: pytest.approx(0.008)}
    notes(trial, 1, 0.002, FIRST_TRY)
    assert trial.held
    notes(trial, 1, 0.002, 1)
    assert not trial.held, "it was long ago"
    notes(trial, 3, 0.010, LEARNED)
    assert trial.begin(3, 4, graph=0.004), "soon, to see whether it is as it was"


@pytest.mark.parametrize("excess", [0.010, 0.009])
def test_a_trial_that_saves_little_changes_nothing(excess: float) -> None:
    trial = TrialOfFewer()
    notes(trial, 3, 0.010, LEARNED)
    assert trial.begin(3, FIRST_TRY, graph=0.004)
    notes(trial, 1, excess, LEARNED)
    assert not trial.go_on(1, LEARNED, graph=0.004) and not trial.held
    notes(trial, 3, 0.010, LEARNED)
    assert not trial.begin(3, FIRST_TRY, graph=0.004), "the next one comes later"
    assert trial.begin(3, FIRST_TRY, graph=0.004)


def test_slow_steps_that_end_by_themselves_show_nothing() -> None:
    """A long prompt was computed beside them, and the trial began when it ended."""
    trial = TrialOfFewer()
    for seconds in (0.010, 0.001):
        notes(trial, 3, seconds, LEARNED)
        assert trial.begin(3, FIRST_TRY, graph=0.004)
        notes(trial, 1, 0.001, LEARNED)
        assert not trial.go_on(1, LEARNED, graph=0.004)
    assert not trial.held
    notes(trial, 3, 0.010, LEARNED)
    assert not trial.begin(3, FIRST_TRY // 2, graph=0.004), "no third one at once"


def test_a_trial_that_was_interrupted_begins_again_soon_but_not_at_once() -> None:
    trial = TrialOfFewer()
    notes(trial, 3, 0.010, LEARNED)
    assert trial.begin(3, FIRST_TRY, graph=0.004)
    trial.interrupt()
    assert trial.left == 0
    notes(trial, 3, 0.010, LEARNED)
    assert not trial.begin(3, FIRST_TRY - 1, graph=0.004)
    assert trial.begin(3, 1, graph=0.004)


def test_trials_of_other_numbers_do_not_agree() -> None:
    trial = TrialOfFewer()
    for more, fewer, asked in ((7, 3, FIRST_TRY), (3, 1, 2 * FIRST_TRY)):
        notes(trial, more, 0.010, LEARNED)
        assert not trial.begin(more, asked - 1, graph=0.004), "nothing is known of it yet"
        assert trial.begin(more, 1, graph=0.004)
        notes(trial, fewer, 0.002, LEARNED)
        assert not trial.go_on(fewer, LEARNED, graph=0.004)
    assert not trial.held
    notes(trial, 3, 0.010, LEARNED)
    assert trial.begin(3, 1, graph=0.004)
    notes(trial, 1, 0.002, LEARNED)
    trial.go_on(1, LEARNED, graph=0.004)
    assert trial.held == {3: pytest.approx(0.008)}


def test_there_is_no_trial_where_graphs_tell_enough() -> None:
    trial = TrialOfFewer()
    notes(trial, 3, 0.001, LEARNED)
    assert not trial.begin(3, LAST_TRY, graph=0.004)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=60))
def test_rates_are_conditional_on_all_drafts_before(seen: list[tuple[int, int]]) -> None:
    found = Acceptance([USUAL] * 3)
    seen = [(drafts, min(accepted, drafts)) for drafts, accepted in seen]
    for drafts, accepted in seen:
        found.add(drafts, accepted)
    for place, rate in enumerate(found.rates):
        tried = sum(drafts > place and accepted >= place for drafts, accepted in seen)
        passed = sum(accepted > place for _, accepted in seen)
        assert rate == pytest.approx((PRIOR * USUAL + passed) / (PRIOR + tried))


def test_old_drafts_lose_weight() -> None:
    found = Acceptance([USUAL])
    for _ in range(100):
        found.add(1, 0, times=100)
        found.limit()
    for _ in range(12):
        found.add(1, 1, times=100)
        found.limit()
    assert found.rates[0] > 0.85
    for _ in range(50):
        found.forget(0.2)
    assert found.rates[0] == pytest.approx(USUAL, abs=0.01)
    later = Acceptance([USUAL] * 3)
    later.add(3, 3, times=100)
    rates = later.rates
    later.forget(1.0, beyond=1)
    assert later.rates == pytest.approx([rates[0], USUAL, USUAL])


def test_usual_rates_give_the_lengths_back() -> None:
    rates = usual_rates([1.8, 2.4, 2.8], 5)
    assert [expected_tokens(rates, count) for count in (1, 2, 3)] == pytest.approx([1.8, 2.4, 2.8])
    assert rates[3] == rates[4] == rates[2]
    assert usual_rates([], 2) == [USUAL, USUAL]
    assert expected_tokens([0.5, 0.5], 2, scale=0.5) == pytest.approx(1 + 0.25 + 0.25**2)
    better = expected_tokens([0.5, 0.4], 2, scale=10)
    assert better == pytest.approx(1 + 0.98 * (1 + 1.25 * 0.4)), "later drafts are little better"


def test_times_are_those_of_the_next_captured_size() -> None:
    times = StepTimes({(1, 0): 1.0, (4, 0): 2.0, (4, 1): 3.0})
    assert [times.at(size, 0) for size in (1, 2, 4, 5)] == [1.0, 2.0, 2.0, None]
    assert times.at(1, 1) == 3.0 and times.at(1, 3) is None
    assert times.sizes == [1, 4] and times.seconds_per_token == 3.0 / 8
