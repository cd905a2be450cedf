"""What steps take, measured while requests are served, and the choice that rests on it."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoop.core.request import OWN_LATER
from stoop.core.step import RowResult, StepPlan, StepResult
from stoop.engine.draft_costs import SURE, DraftCosts, between, load_of
from stoop.engine.draft_estimates import expected_tokens
from stoop.engine.draft_policy import EVERY, OWN_PRIOR, AdaptiveDrafts, Batch
from stoop.engine.eager_costs import (
    ATTEMPTS,
    EARLY_GAP,
    ENOUGH,
    KNOWN_GAP,
    LATE_GAP,
    NEWEST,
    PROMPT_SHARE,
    RETRY,
    SEVERAL_GAP,
    WARM_STEPS,
    EagerCosts,
    PromptTime,
)
from stoop.engine.step_costs import StepTime
from support.scheduling import make_request, make_scheduler
from support.scheduling import step as take_step

COUNTS = (0, 1, 2, 3)
Times = Callable[[int, int], float]  # seconds, by requests and drafts


class Row(NamedTuple):
    """Of a plan, as far as policies look."""

    decodes: bool
    num_tokens: int
    num_computed: int = 50


def memory_bound(num_reqs: int, num_drafts: int) -> float:
    """4 ms for up to two tokens, and 1 ms for each of the others; a draft takes 0.4 ms."""
    return 0.004 + 0.001 * max(0, num_reqs * (num_drafts + 1) - 2) + 0.0004 * num_drafts


class Server:
    """Decodes of as many requests as told, in steps that take as long as told."""

    def __init__(self, policy: AdaptiveDrafts, times: Times, seed: int = 1) -> None:
        self.policy, self.times = policy, times
        self.random = random.Random(seed)
        self.steps = self.num_tried = 0
        self.chosen: Counter[int] = Counter()
        self.has_kv = True
        self.made = 0  # drafts for the next step
        self.noise = 0.0
        self.request = make_request("r", [1])  # the first one

    def serve(self, num_reqs: int, rate: float, steps: int) -> float:
        """Returns tokens a second."""
        policy, costs, tokens, seconds = self.policy, self.policy.costs, 0, 0.0
        for _ in range(steps):
            if self.steps % EVERY == 0:
                drafted = num_reqs if self.has_kv else 0
                batch = Batch(
                    num_reqs,
                    Counter([3] * drafted),
                    Counter([3] * (num_reqs - drafted)),
                    40 * (num_reqs - drafted),
                    self.scale,
                )
                if policy.decide(batch):
                    seconds += batch.tokens_lacking * 0.001
                    self.request.forget_drafts(OWN_LATER)
                    self.has_kv = True
            verified, made = costs.plan(num_reqs, policy.num_drafts)
            assert verified <= self.made or not self.has_kv
            self.chosen[policy.num_drafts] += 1
            self.num_tried += made != policy.num_drafts or verified < min(self.made, made)
            rows = []
            for number in range(num_reqs):
                num_drafts = verified if self.has_kv else 0
                accepted = 0
                while accepted < num_drafts and self.random.random() < rate:
                    accepted += 1
                rows.append(RowResult("r", 0, [1] * (accepted + 1), num_drafts))
                if num_drafts and number == 0:
                    self.request.note_drafts(accepted > 0)
                tokens += accepted + 1
            drafting = 0.0004 * made
            taken = self.times(num_reqs, verified) + drafting - 0.0004 * verified
            taken *= 1 + self.noise * self.random.uniform(-1, 1)
            plan = StepPlan(self.steps, [Row(True, verified + 1)] * num_reqs, made)  # type: ignore[list-item]
            time = StepTime(taken, 0.0, taken, drafting)
            policy.note(plan, StepResult(self.steps, rows), time)
            self.has_kv &= made > 0
            self.made, self.steps = made, self.steps + 1
            seconds += taken
        return tokens / seconds

    @property
    def scale(self) -> float:
        """As the policy reads it of requests."""
        mean = self.policy.acceptance.rates[0]
        own, steps = self.request.num_first_accepted, self.request.num_drafted
        return (own + OWN_PRIOR * mean) / (steps + OWN_PRIOR) / mean

    def new_requests(self) -> None:
        """The last ones have ended."""
        self.policy.note_idle()
        self.request = make_request("r", [1])
        self.has_kv = True


def start(
    times: Times = memory_bound,
    known: Sequence[DraftCosts] = (),
    keep: Callable[[DraftCosts], None] = lambda costs: None,
    usual: Sequence[float] = (),
) -> Server:
    costs = EagerCosts(COUNTS, known, keep)
    return Server(AdaptiveDrafts(costs, COUNTS, usual, starts_over=True), times)


def best_fixed(times: Times, num_reqs: int, rate: float) -> float:
    return max(
        num_reqs * expected_tokens([rate] * count, count) / times(num_reqs, count)
        for count in COUNTS
    )


@pytest.mark.parametrize("num_reqs", [1, 2, 4, 16])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.6, 0.9])
def test_it_is_as_fast_as_the_best_fixed_number(num_reqs: int, rate: float) -> None:
    server = start()
    server.noise = 0.1
    server.serve(num_reqs, rate, 200)  # learns
    assert server.serve(num_reqs, rate, 1000) > 0.95 * best_fixed(memory_bound, num_reqs, rate)


def test_until_costs_are_known_it_drafts_and_measures() -> None:
    server = start(lambda num_reqs, count: 0.01 * (1 + count))  # drafts never pay
    costs = server.policy.costs
    server.serve(1, 0.7, 1 + WARM_STEPS + ENOUGH + EARLY_GAP)
    assert costs.sizes == [] and server.policy.num_drafts == 3
    server.serve(1, 0.7, ENOUGH * (EARLY_GAP + 2) + EVERY)
    assert costs.sizes == [1] and server.policy.num_drafts == 0
    server.new_requests()
    assert server.policy.hopeless
    assert costs.bare_seconds(1, 0) == pytest.approx(0.01, rel=0.05)
    assert costs.bare_seconds(1, 3) == pytest.approx(0.04, rel=0.05)


@pytest.mark.parametrize(
    ("num_reqs", "known", "gap"),
    [
        (1, False, EARLY_GAP),
        (4, False, SEVERAL_GAP),
        (1, True, KNOWN_GAP),
        (4, True, KNOWN_GAP),
    ],
)
def test_what_is_known_is_measured_less_often(num_reqs: int, known: bool, gap: int) -> None:
    ms = {count: 1e3 * memory_bound(1, count) for count in COUNTS}
    server = start(known=[DraftCosts(ms, load=num_reqs)] if known else [])
    tried = []
    for step in range(200):
        before = server.num_tried
        server.serve(num_reqs, 1.0, 1)
        tried += [step] * (server.num_tried > before)
    assert tried[0] >= gap and tried[1] - tried[0] > gap
    assert tried[0] <= WARM_STEPS + ENOUGH + gap + 4
    later = start()
    later.serve(1, 1.0, 400)
    before = later.num_tried
    later.serve(1, 1.0, 10 * LATE_GAP)
    assert 5 <= later.num_tried - before <= 30, "a try may take a step to get there, and one back"


def test_known_costs_decide_at_once() -> None:
    paying, useless = ({0: 4.0, 3: 4.0 + each} for each in (1.0, 20.0))
    server = start(known=[DraftCosts(paying), DraftCosts(useless, load=8)])
    for num_reqs, expected in ((1, 3), (8, 0), (5, 0)):
        server.policy.decide(Batch(num_reqs, Counter({3: num_reqs})))
        assert server.policy.num_drafts == expected
    assert server.policy.describe() == "3 drafts at 1 request, none at 8, as far as measured"
    assert not server.policy.hopeless
    assert start().policy.describe() == "3 drafts until it is known what they cost"
    only = start(known=[DraftCosts({0: 4.0, 3: 30.0})]).policy
    assert only.describe() == "none at 1 request, as far as measured"
    several = start(known=[DraftCosts({0: 4.0, 3: 4.1}, load=load) for load in (1, 2, 8)]).policy
    assert several.describe() == "3 drafts at 1 to 8 requests, as far as measured"


def test_costs_are_kept_as_they_become_known() -> None:
    kept: list[DraftCosts] = []
    server = start(keep=kept.append)
    server.serve(1, 1.0, 150)
    assert [sorted(each.ms) for each in kept] == [[0, 3], [0, 1, 3], [0, 1, 2, 3]]
    assert [each.tries for each in kept] == [ENOUGH] * 3
    for count in COUNTS:
        assert kept[-1].ms[count] == pytest.approx(1e3 * memory_bound(1, count), rel=0.01)
    assert not kept[-1].busy and kept[-1].load == 1
    server.serve(3, 1.0, 150)
    assert kept[-1].load == 4 and len(kept[-1].ms) == len(COUNTS)


def test_costs_measured_beside_other_programs_say_so() -> None:
    kept: list[DraftCosts] = []
    costs = EagerCosts((0, 1), keep=kept.append)
    for step in range(100):
        verified, made = costs.plan(1, 1)
        plan = StepPlan(step, [Row(True, verified + 1)], made)  # type: ignore[list-item]
        costs.note(plan, StepTime(0.01, 0.0, 0.01, 0.001, busy=step == 8))
    assert [each.busy for each in kept] == [True, True]
    assert [each.tries for each in kept] == [ENOUGH, SURE], "again when it is sure"


def test_other_programs_of_long_ago_disturb_no_costs() -> None:
    """Once every sample is newer, the costs are kept again, and then no busy ones any more."""
    kept: list[DraftCosts] = []
    costs = EagerCosts(COUNTS, keep=kept.append)
    noted = 0

    def run(num_steps: int, slower: float, busy: bool) -> None:
        nonlocal noted
        for _ in range(num_steps):
            verified, made = costs.plan(1, 3)
            plan = StepPlan(noted, [Row(True, verified + 1)], made)  # type: ignore[list-item]
            seconds = 0.01 + 0.01 * slower * verified
            costs.note(plan, StepTime(seconds, 0.0, seconds, 0.0, busy=busy))
            noted += 1

    run(600, 3.0, busy=True)
    assert {each.busy for each in kept} == {True} and kept[-1].sure
    before = len(kept)
    run(NEWEST * LATE_GAP, 1.0, busy=False)
    assert len(kept) == before, "some samples are older"
    run(3 * NEWEST * LATE_GAP, 1.0, busy=False)
    (calm,) = kept[before:]
    assert not calm.busy and calm.sure
    assert calm.ms == pytest.approx({0: 10, 1: 20, 2: 30, 3: 40}, rel=0.01)
    run(600, 3.0, busy=True)
    assert kept[-1] is calm


@pytest.mark.parametrize(("rate", "expected"), [(0.95, 3), (0.6, 1)])
def test_a_machine_that_slows_down_changes_no_choice(rate: float, expected: int) -> None:
    """Other programs make all steps longer, and the ones measured before are no longer true."""
    slow = 1.0
    server = start(lambda num_reqs, count: slow * (0.004 + 0.0012 * count + 0.0008 * (count > 1)))
    server.serve(1, rate, 600)
    usually = server.chosen.most_common(1)[0][0]
    assert usually == expected
    for slow in (3.0, 0.5, 1.0):  # noqa: B007
        server.chosen.clear()
        server.serve(1, rate, 60)
        assert server.chosen[0] == 0 and server.chosen.most_common(1)[0][0] == expected


def test_one_slow_step_decides_nothing() -> None:
    server = start()
    server.serve(1, 0.95, 200)
    taken, server.times = server.times, lambda num_reqs, count: 5.0
    server.serve(1, 0.95, 2)
    server.times, server.chosen = taken, Counter()
    server.serve(1, 0.95, 60)
    assert server.chosen[3] == 60


def test_what_changed_is_found_out() -> None:
    """Drafts take longer than they did, and later as long as before."""
    server = start()
    server.serve(1, 0.9, 300)
    assert server.policy.num_drafts == 3
    server.times = lambda num_reqs, count: 0.004 + 0.006 * count
    server.serve(1, 0.9, 3 * LATE_GAP * NEWEST)
    assert server.policy.num_drafts == 0
    server.times = memory_bound
    server.new_requests()
    server.serve(1, 0.9, 100)
    assert server.policy.hopeless
    assert server.policy.num_drafts == 0, "drafts do not pay, as far as is known"
    server.serve(1, 0.9, RETRY)
    assert server.policy.num_drafts > 1, "also while requests are served without a pause"
    server.new_requests()
    assert not server.policy.hopeless


def test_a_number_that_was_in_use_for_long_is_found_again() -> None:
    server = start()
    server.serve(1, 0.95, 20000)
    assert server.policy.num_drafts == 3
    server.times = lambda num_reqs, count: memory_bound(num_reqs, count) + 0.02 * (count > 1)
    server.serve(1, 0.95, 6000)
    assert server.policy.num_drafts == 1
    server.times = memory_bound
    server.serve(1, 0.95, 6000)
    assert server.policy.num_drafts > 1


def test_steps_after_another_number_that_take_longer_tip_nothing() -> None:
    """Caches are colder then. What steps are said to take must stay what they take."""
    server = start()
    last = [3]

    def colder(num_reqs: int, count: int) -> float:
        last[:] = [last[-1], count]
        return memory_bound(num_reqs, count) * (1.2 if last[0] != count else 1.0)

    server.times = colder
    server.serve(1, 0.95, 60000)
    assert server.policy.num_drafts == 3
    for count in COUNTS:
        found = server.policy.costs.bare_seconds(1, count)
        assert found == pytest.approx(memory_bound(1, count), rel=0.25)


@pytest.mark.parametrize("known", [True, False])
def test_drafts_that_return_are_verified(known: bool) -> None:
    """Steps without drafts, which took their turn for long, are not tried in every step now."""
    ms = {count: 1e3 * memory_bound(1, count) for count in COUNTS}
    server = start(known=[DraftCosts(ms)] if known else [])
    if not known:
        server.serve(1, 0.9, 400)
    server.new_requests()
    server.serve(1, 0.0, 300)
    assert server.policy.num_drafts == 0
    for _ in range(3):
        server.new_requests()
        before, server.chosen = server.num_tried, Counter()
        assert server.serve(1, 0.9, 300) > 0.87 * best_fixed(memory_bound, 1, 0.9)
        assert server.chosen[0] == 0 and server.num_tried - before < 40


def test_bad_drafts_stop_and_the_next_requests_get_some_again() -> None:
    server = start()
    server.serve(1, 0.9, 300)
    server.new_requests()
    server.serve(1, 0.0, 100)
    assert server.policy.num_drafts == 0 and not server.policy.hopeless
    assert server.serve(1, 0.0, 100) > 0.97 / 0.004
    server.new_requests()
    server.serve(1, 0.9, 40)
    assert server.policy.num_drafts > 0
    server.new_requests()
    assert server.serve(1, 0.9, 100) > 0.85 * best_fixed(memory_bound, 1, 0.9)


@pytest.mark.parametrize("rate", [0.2, 0.95])
def test_an_idle_time_leaves_a_tenth_of_what_is_known(rate: float) -> None:
    """What comes next may be another text, or the same kind again."""
    server = start(lambda num_reqs, count: 0.004 + 0.0001 * count)  # drafts pay in any case
    server.serve(1, rate, 600)
    before = server.policy.acceptance.rates[0]
    server.new_requests()
    after = server.policy.acceptance.rates[0]
    assert before == pytest.approx(rate, abs=0.05) and after == pytest.approx(before, abs=0.08)
    server.serve(1, 0.6, 200)
    assert server.policy.acceptance.rates[0] == pytest.approx(0.6, abs=0.15)


def test_later_drafts_are_tried_again_where_texts_got_better() -> None:
    """With 1 draft there is nothing to learn of the others."""
    server = start(lambda num_reqs, count: 0.004 + 0.001 * count)
    acceptance = server.policy.acceptance
    for _ in range(200):  # good first drafts, and bad ones after them
        acceptance.add(3, 1)
    server.serve(1, 0.95, 100)
    assert server.chosen[3] < 60
    server.chosen.clear()
    server.serve(1, 0.95, 4000)
    assert server.policy.num_drafts == 3 and server.chosen[3] > 2000


@pytest.mark.parametrize(("cost", "hopeless"), [(3.0, False), (4.5, True)])
def test_drafts_are_left_out_for_good_only_if_good_ones_would_not_pay(
    cost: float, hopeless: bool
) -> None:
    """What is usual may be wrong by far, where no benchmark has shown it."""
    known = [DraftCosts({count: 4.0 + cost * count for count in COUNTS})]
    server = start(known=known)
    assert server.policy.hopeless == hopeless
    server.serve(1, 0.95, 40)
    server.new_requests()
    assert server.policy.hopeless == hopeless


def test_more_requests_than_were_measured_gain_no_more_by_drafts() -> None:
    """Where fewer gain nothing, contexts are not computed again to find out."""
    known = [DraftCosts({0: 20.0, 3: 70.0}, load=1)]
    policy = AdaptiveDrafts(EagerCosts(COUNTS, known), COUNTS)
    for _ in range(500):
        assert not policy.decide(Batch(4, Counter(), Counter({3: 4}), 16000))
    known = [DraftCosts({0: 20.0, 3: 21.0}, load=1)]
    policy = AdaptiveDrafts(EagerCosts(COUNTS, known), COUNTS)
    policy.costs._prompts.append(PromptTime(2.0, 0.0, 1000))
    policy.num_drafts, steps = 0, 0
    while not policy.decide(Batch(4, Counter(), Counter({3: 4}), 16000)):
        steps += EVERY
    assert 16000 * 0.002 < steps * 0.020 < 4 * 16000 * 0.002, "it must have cost as much time"


def test_steps_without_drafts_are_measured_before_drafts_are_left_out() -> None:
    """Two other numbers do not tell: what the first draft costs is not what the third one does."""
    costs = EagerCosts(COUNTS)
    for count in (1, 3):
        costs.plan(1, count)
        for _ in range(WARM_STEPS + ENOUGH):
            note(costs, [Row(True, count + 1)], count, 0.02 * count)
    assert costs.sizes == [] and costs.bare_seconds(1, 0) is None
    assert costs.seconds(1, 0) == 0.06
    assert costs.seconds(1, 3) == 0.06, "as far as is known, drafts cost nothing"


def test_where_drafts_cannot_pay_prompts_get_no_kv_of_the_drafter() -> None:
    known = [DraftCosts({0: 4.0, 1: 12.0, 2: 20.0, 3: 30.0})]
    policy = AdaptiveDrafts(EagerCosts(COUNTS, known), COUNTS, starts_over=True)
    scheduler = make_scheduler(num_drafts=3, drafter_has_kv=True)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=9, num_drafts=3))
    policy.choose(scheduler)
    assert scheduler.num_drafts == 0 and policy.hopeless and not scheduler.keeps_drafter_kv
    assert take_step(scheduler).num_drafts == 0
    policy.note_idle()
    policy.choose(scheduler)
    assert scheduler.num_drafts == 0, "for good"
    pays = AdaptiveDrafts(EagerCosts(COUNTS), COUNTS, starts_over=True)
    pays.choose(scheduler)
    assert scheduler.num_drafts == 3 and scheduler.keeps_drafter_kv


# ---- which steps count ----


def note(costs: EagerCosts, rows: Sequence[Row], made: int, seconds: float) -> None:
    plan = StepPlan(1, list(rows), made)  # type: ignore[arg-type]
    costs.note(plan, StepTime(9.0, 0.0, seconds, 0.25 * seconds))


def try_plain(costs: EagerCosts, seconds: float) -> None:
    """A step without drafts, which then makes three, and one that verifies these."""
    note(costs, [Row(True, 1)], 3, seconds)
    note(costs, [Row(True, 4)], 3, 10.0)


def warm_costs() -> EagerCosts:
    """3 drafts are in use, and take 10 s."""
    costs = EagerCosts(COUNTS)
    costs.plan(1, 3)
    for _ in range(WARM_STEPS):
        note(costs, [Row(True, 4)], 3, 7.0)
    for _ in range(ENOUGH):
        note(costs, [Row(True, 4)], 3, 10.0)
    assert costs.sizes == []
    return costs


def test_the_first_steps_do_not_count() -> None:
    costs = warm_costs()
    for _ in range(ENOUGH):
        try_plain(costs, 4.0)
    assert costs.bare_seconds(1, 3) == 10.0


def test_a_step_that_verifies_no_drafts_counts_without_the_time_of_new_ones() -> None:
    costs = warm_costs()
    for _ in range(ENOUGH):
        try_plain(costs, 4.0)
    assert costs.bare_seconds(1, 0) == pytest.approx(3.0)


@pytest.mark.parametrize(("before", "after"), [(10.0, 4.0), (4.0, 10.0), (30.0, 10.0)])
def test_a_try_while_the_machine_changes_does_not_count(before: float, after: float) -> None:
    """It cannot be compared with steps of another speed."""
    costs = warm_costs()
    for _ in range(5):
        note(costs, [Row(True, 4)], 3, before)
        note(costs, [Row(True, 1)], 3, 4.0)
        note(costs, [Row(True, 4)], 3, after)
    assert costs.sizes == []


def test_one_try_that_was_disturbed_is_no_mean() -> None:
    costs = warm_costs()
    try_plain(costs, 40.0)
    try_plain(costs, 4.0)
    assert costs.bare_seconds(1, 0) == pytest.approx(3.0)


@pytest.mark.parametrize("factor", [3, 10])
@pytest.mark.parametrize("num_slow", range(4, 20, 3))
def test_a_slow_start_keeps_no_drafts_away(factor: int, num_slow: int) -> None:
    """Other programs, or memory that is cold, for the first steps."""
    kept, steps = [], [0]

    def times(num_reqs: int, num_drafts: int) -> float:
        steps[0] += 1
        slower = factor if steps[0] <= num_slow else 1
        return memory_bound(num_reqs, num_drafts) * slower

    server = start(times, keep=kept.append)
    server.serve(1, 0.8, 200)
    server.chosen.clear()
    server.serve(1, 0.8, 300)
    assert server.chosen[0] == 0
    assert kept[-1].ms[3] < 3 * kept[-1].ms[0]


@pytest.mark.parametrize("seed", range(8))
def test_bursts_of_other_programs_change_no_choice(seed: int) -> None:
    source, left, slow = random.Random(seed), 0.0, False

    def times(num_reqs: int, num_drafts: int) -> float:
        nonlocal left, slow
        if left <= 0:
            slow = not slow
            left = source.expovariate(1 / (8 if slow else 22))
        left -= 1
        return memory_bound(num_reqs, num_drafts) * (10 if slow else 1)

    server = start(times)
    server.serve(1, 0.7, 1000)
    server.chosen.clear()
    server.serve(1, 0.7, 200)
    assert server.chosen.most_common(1)[0][0] in (1, 2)  # 4 % apart, and 1.4 times as fast as none


def test_steps_with_prompts_and_steps_between_two_numbers_do_not_count() -> None:
    costs = warm_costs()
    for _ in range(ENOUGH):
        note(costs, [Row(True, 1), Row(False, 30, 0)], 3, 4.0)
        note(costs, [Row(True, 2)], 3, 5.0)
    assert costs.sizes == []
    for _ in range(ENOUGH):
        try_plain(costs, 4.0)
    assert costs.bare_seconds(1, 1) == pytest.approx(3.0 + 7.0 / 3), "on the line"


def test_a_short_prompt_beside_decodes_leaves_them_measurable() -> None:
    """Where requests are short, hardly any step has no prompt."""
    costs = warm_costs()
    note(costs, [Row(False, 30, 0)], 3, 15.0)  # 0.5 s a token, of which the drafter takes 0.125
    for _ in range(ENOUGH):
        note(costs, [Row(True, 1), Row(False, 4, 0)], 3, 8.0)  # 2 s are the drafter's
        note(costs, [Row(True, 4), Row(False, 8, 0)], 3, 14.0)
    assert costs.bare_seconds(1, 3) == pytest.approx(10.0)
    assert costs.bare_seconds(1, 0) == pytest.approx(8.0 - 2.0 - 4 * 0.375)
    assert costs.sizes == [1], "a request that does not decode yet is none of the load"


@pytest.mark.parametrize("loads", [(17, 17, 32, 32), (9, 9, 16, 16), (17, 24, 32)])
def test_a_load_that_keeps_step_with_the_tries_keeps_no_drafts(loads: Sequence[int]) -> None:
    """Decodes of one load that come and go: steps around a try never take as long as each other."""

    def times(num_reqs: int, num_drafts: int) -> float:
        return 0.002 * num_reqs * (num_drafts + 1)

    server = start(times)
    for step in range(400):
        server.serve(loads[step % len(loads)], 0.2, 1)
    assert server.chosen[0] > 200


def test_prompts_show_what_their_tokens_take() -> None:
    costs = warm_costs()
    assert costs.seconds_per_token == PROMPT_SHARE * 10.0
    note(costs, [Row(True, 1), Row(False, 30, 0)], 3, 4.0)
    assert costs.seconds_per_token == PROMPT_SHARE * 10.0
    note(costs, [Row(False, 30, 0), Row(False, 10, 0)], 3, 4.0)
    assert costs.seconds_per_token == 0.1
    note(costs, [Row(False, 1, 0)], 3, 0.1)  # most of it was cached
    assert costs.seconds_per_token == pytest.approx(0.1)


def test_steps_beside_prompts_are_not_made_worse() -> None:
    """They show nothing, so no other number of drafts is tried in them."""
    costs = warm_costs()
    for _ in range(EARLY_GAP):
        note(costs, [Row(True, 4)], 3, 7.0)
    planned = []
    for _ in range(50):
        planned.append(costs.plan(1, 3))
        verified, made = planned[-1]
        note(costs, [Row(True, verified + 1), Row(False, 30, 0)], made, 9.0)
    assert planned == [(0, 3)] + [(3, 3)] * 49
    assert costs.plan(0, 3) == (3, 3), "a prompt alone"


def test_a_try_that_shows_nothing_is_given_up() -> None:
    costs = warm_costs()
    for _ in range(EARLY_GAP):
        note(costs, [Row(True, 4)], 3, 7.0)
    planned = [costs.plan(1, 3) for _ in range(50)]  # steps that fail, say
    assert planned == [(0, 3)] * ATTEMPTS + [(3, 3)] * (50 - ATTEMPTS)


def test_a_step_verifies_no_more_drafts_than_were_made() -> None:
    costs = EagerCosts(COUNTS)
    assert costs.plan(1, 3) == (0, 3), "the step before was none"
    assert costs.plan(1, 3) == (3, 3)
    assert costs.plan(1, 1) == (1, 1)
    assert costs.plan(1, 3) == (1, 3)
    assert costs.plan(1, 0) == (0, 0)
    assert costs.plan(1, 2) == (0, 2)


# ---- in between ----


@given(
    st.dictionaries(st.integers(0, 8), st.floats(1, 100), min_size=2, max_size=5),
    st.integers(0, 9),
)
def test_unmeasured_numbers_lie_on_lines(known: dict[int, float], count: int) -> None:
    found, low, high = between(known, count), min(known.values()), max(known.values())
    if count in known:
        assert found == known[count]
    elif min(known) < count < max(known):
        assert low - 1e-6 <= found <= high + 1e-6
        below, above = max(k for k in known if k < count), min(k for k in known if k > count)
        share = (count - below) / (above - below)
        assert found == pytest.approx((1 - share) * known[below] + share * known[above])
    assert found >= low / 2


def test_lines_go_on_beyond_the_ends() -> None:
    assert between({0: 4.0, 1: 5.0, 2: 7.0}, 3) == 9.0
    assert between({1: 5.0, 3: 7.0}, 0) == 4.0
    assert between({1: 1.0, 2: 9.0}, 0) == 0.5, "no step takes less than nothing"


def test_several_requests_get_drafts_only_where_they_clearly_pay() -> None:
    """Steps with prompts are not timed, and drafts make them longer."""
    known = [DraftCosts({0: 10.0, 3: 10.0}, load=load) for load in (1, 2)]
    costs = EagerCosts(COUNTS, known)
    assert costs.seconds(1, 0) == costs.seconds(1, 3) == costs.seconds(2, 3) == 0.010
    assert costs.seconds(2, 0) == pytest.approx(0.0095)


def test_loads_are_powers_of_two() -> None:
    assert [load_of(n) for n in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]


def test_later_tries_count_the_second_step_alone() -> None:
    """The first one takes longer than those that would follow."""
    costs = warm_costs()
    for _ in range(ENOUGH):
        try_plain(costs, 8.0)  # 6 s without those of drafts
    assert costs.bare_seconds(1, 0) == pytest.approx(6.0)
    try_plain(costs, 8.0)
    note(costs, [Row(True, 1)], 3, 8.0)
    assert costs.bare_seconds(1, 0) == pytest.approx(6.0), "neither was a second one"
    try_plain(costs, 6.4)
    assert costs.bare_seconds(1, 0) == pytest.approx((6.0 + 4.8) / 2), "with the best before it"
