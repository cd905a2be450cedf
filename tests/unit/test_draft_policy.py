"""How many drafts a step makes, by times given by hand."""

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from stoop.core.step import PlannedRow, RowResult, StepPlan, StepResult
from stoop.engine.draft_estimates import PRIOR, USUAL, Acceptance, expected_tokens
from stoop.engine.draft_policy import (
    EVERY,
    FIRST_GAP,
    LAST_GAP,
    REFILL,
    AdaptiveDrafts,
    Batch,
)
from stoop.engine.step_costs import FIRST_TRY, LAST_TRY, GraphCosts, StepTime, StepTimes
from stoop.scheduler.scheduler import Scheduler
from support.scheduling import make_request, make_rules, make_scheduler
from support.scheduling import step as take_step

COUNTS = (0, 1, 3)
RULES = (make_rules(num_drafts=3), make_rules(num_drafts=0))
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# A memory-bound step takes 4 ms however few tokens it has; above 128 tokens it takes as long as
# they are many. A draft takes 0.2 ms more.
TIMES = StepTimes(
    {
        (size, count): 0.004 * max(1.0, size * (count + 1) / 128) + 0.0002 * count
        for size in SIZES
        for count in COUNTS
        if size * (count + 1) <= 512
    }
)


def make_policy(
    times: StepTimes,
    counts: Sequence[int],
    *usual: Any,
    host_computes: bool = False,
    **options: Any,
) -> AdaptiveDrafts:
    """With the times of captured graphs."""
    return AdaptiveDrafts(GraphCosts(times, counts, host_computes), counts, *usual, **options)


def make_batch(
    num_reqs: int, drafted: int, lacking: int = 0, tokens_lacking: int = 0, scale: float = 1.0
) -> Batch:
    """Of requests that want as many drafts as there are."""
    counts = (Counter([3] * count) for count in (drafted, lacking))
    return Batch(num_reqs, *counts, tokens_lacking, scale)


class Row(NamedTuple):
    """Of a plan, as far as the policy looks."""

    decodes: bool
    num_tokens: int


DECODE = Row(True, 4)
NO_TIME = StepTime(None, 0.0)


def settled(policy: AdaptiveDrafts, num_reqs: int, rate: float, steps: int = 400) -> float:
    """Serve so many requests, whose drafts are accepted at a rate. Returns tokens a second."""
    source, tokens, seconds = random.Random(1), 0, 0.0
    has_kv, known = True, 100
    for step in range(steps):
        if step % EVERY == 0:
            drafted = num_reqs if has_kv else 0
            lacking = num_reqs - drafted
            if policy.decide(make_batch(num_reqs, drafted, lacking, lacking * known)):
                seconds += num_reqs * known * policy.costs.times.seconds_per_token
                has_kv = True
        count = policy.num_drafts
        has_kv &= count > 0
        rows = []
        for _ in range(num_reqs):
            accepted = 0
            while has_kv and accepted < count and source.random() < rate:
                accepted += 1
            rows.append(RowResult("r", 0, [1] * (accepted + 1), count if has_kv else 0))
            tokens += accepted + 1
        plan = StepPlan(step, [DECODE._replace(num_tokens=count + 1)], count)  # type: ignore[list-item]
        policy.note(plan, StepResult(step, rows), NO_TIME)
        time = policy.costs.times.at(num_reqs, count)
        assert time is not None, "only captured sizes are chosen"
        seconds += time
    return tokens / seconds


def best_fixed(num_reqs: int, rate: float) -> float:
    return max(
        num_reqs * expected_tokens([rate] * count, count) / time
        for count in COUNTS
        if (time := TIMES.at(num_reqs, count)) is not None
    )


@pytest.mark.parametrize("num_reqs", SIZES)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
def test_it_is_as_fast_as_the_best_fixed_number(num_reqs: int, rate: float) -> None:
    policy = make_policy(TIMES, COUNTS)
    settled(policy, num_reqs, rate, steps=200)  # learns
    assert settled(policy, num_reqs, rate, steps=1000) > 0.96 * best_fixed(num_reqs, rate)


def test_a_head_that_is_never_right_is_left_out_soon() -> None:
    policy = make_policy(TIMES, COUNTS)
    plain = 1 / 0.004
    assert settled(policy, 1, 0.0, steps=160) > 0.93 * plain
    assert policy.num_drafts == 0
    assert settled(policy, 1, 0.0, steps=1000) > 0.99 * plain


def test_drafts_come_back_when_the_batch_shrinks() -> None:
    """What the drafter lacks is computed again once going without has cost as much."""
    policy = make_policy(TIMES, COUNTS)
    policy.decide(make_batch(256, 256))
    assert policy.num_drafts == 0
    lacking = 4 * 300
    steps = 0
    while not policy.decide(make_batch(4, 0, 4, lacking)):
        assert policy.num_drafts == 0
        steps += EVERY
    assert policy.num_drafts == 3
    gain = 1 - TIMES.at(4, 3) / (TIMES.at(4, 0) * expected_tokens([USUAL] * 3, 3))  # type: ignore[operator]
    cost = lacking * TIMES.seconds_per_token + REFILL * 0.004
    assert cost / (0.004 * gain) - EVERY <= steps <= cost / (0.004 * gain) + EVERY
    policy = make_policy(TIMES, COUNTS)
    policy.decide(make_batch(256, 256))
    assert not any(policy.decide(make_batch(256, 0, 256, 9)) for _ in range(999)), "no gain"


def test_drafts_that_do_not_last_come_back_later_and_later() -> None:
    """A request whose drafts are bad, after many whose drafts were good."""
    policy = make_policy(TIMES, COUNTS)
    again = []
    for step in range(0, 20000, EVERY):
        drafted = 0 if policy.num_drafts == 0 else 1
        if policy.decide(
            make_batch(1, drafted, 1 - drafted, 50 * (1 - drafted), 0.02 if drafted else 1)
        ):
            again.append(step)
    gaps = [b - a for a, b in pairwise(again)]
    assert len(again) < 60 and gaps[-1] > 8 * gaps[0]


def test_more_requests_than_any_graph_has_get_none() -> None:
    policy = make_policy(TIMES, COUNTS)
    policy.decide(make_batch(1000, 1000))
    assert policy.num_drafts == 0


def test_probes_are_rare_and_rarer() -> None:
    policy = make_policy(TIMES, COUNTS)
    policy.acceptance.add(3, 0, times=500)
    probes = []
    for step in range(0, 6000, EVERY):
        policy.decide(make_batch(8, 8))  # new requests all the time
        if policy.num_drafts:
            assert policy.num_drafts == 1
            probes.append(step)
            policy.acceptance.add(1, 0, times=8 * EVERY)
    gaps = [b - a for a, b in pairwise(probes)]
    assert gaps[0] <= 2 * FIRST_GAP + 2 * EVERY and gaps == sorted(gaps)
    assert LAST_GAP - EVERY <= gaps[-1] <= LAST_GAP + 3 * EVERY
    policy.acceptance.add(1, 1, times=500)  # better ones
    policy.decide(make_batch(8, 8))
    assert policy.num_drafts > 0


def test_without_requests_that_get_drafts_there_is_no_probe() -> None:
    policy = make_policy(TIMES, COUNTS)
    policy.acceptance.add(3, 0, times=500)
    for _ in range(100):
        assert not policy.decide(make_batch(8, 0, 8, 10**9))
        assert policy.num_drafts == 0


def test_a_change_must_be_worth_it() -> None:
    """Two numbers that are about as fast do not take turns."""
    even = StepTimes({(8, 0): 1.0, (8, 1): 1.5, (8, 3): 1.6})
    policy = make_policy(even, COUNTS, [0.5, 0.2, 0.0])
    policy.acceptance.add(1, 1, times=250)
    policy.acceptance.add(1, 0, times=250)
    policy.decide(make_batch(8, 8))
    chosen = []
    for step in range(200):
        policy.acceptance.add(1, step % 2, times=4)
        policy.acceptance.limit()
        policy.decide(make_batch(8, 8))
        chosen.append(policy.num_drafts)
    changes = sum(a != b for a, b in pairwise(chosen))
    assert changes <= 2 * 200 * EVERY // LAST_GAP + 10, "but for probes, it stays as it is"


def observe(policy: AdaptiveDrafts, num_reqs: int, seconds: float, waited: float) -> None:
    rows = [Row(True, policy.num_drafts + 1)] * num_reqs
    for step in range(200):
        plan = StepPlan(step, rows, policy.num_drafts)  # type: ignore[arg-type]
        policy.note(plan, StepResult(step, []), StepTime(seconds, waited))


@pytest.mark.parametrize("host_computes", [False, True])
def test_long_contexts_favour_drafts(host_computes: bool) -> None:
    """Their KV is read once a step, whatever is verified."""
    policy = make_policy(TIMES, COUNTS, host_computes=host_computes)
    policy.decide(make_batch(64, 64))
    assert policy.num_drafts == 1
    expected = TIMES.at(64, 1)
    assert expected is not None
    observe(policy, 64, 3 * expected, 0.0 if host_computes else 2 * expected)
    assert policy.costs.added == pytest.approx(2 * expected, rel=0.01)
    policy.decide(make_batch(64, 64))
    assert policy.num_drafts == 3


def test_what_a_token_of_prompts_takes_is_learned_from_steps_of_prompts_alone() -> None:
    costs = GraphCosts(TIMES, COUNTS)
    at_first, waited = TIMES.seconds_per_token, 0.001

    def note(seconds: float, rows: Sequence[Row], num_drafts: int = 0) -> None:
        costs.note(StepPlan(0, list(rows), num_drafts), StepTime(seconds, waited))  # type: ignore[arg-type]

    note(0.001, [Row(False, 8)])
    assert costs.seconds_per_token == at_first, "it says what a step takes, whatever its prompts"
    note(5.0, [Row(False, 2048)])
    assert at_first < costs.seconds_per_token < 2 * at_first, "kernels were loaded"
    for _ in range(40):
        note(0.010, [Row(False, 500), Row(False, 500)])
    assert costs.seconds_per_token == pytest.approx(1e-5, rel=0.01)
    plain = TIMES.at(65, 0)
    assert plain is not None
    for _ in range(100):
        note(plain + 0.002 + 0.003, [*[Row(True, 1)] * 64, Row(False, 300)])
        note(plain + 0.050, [*[Row(True, 1)] * 64, Row(False, 4000)])
    assert costs.added == pytest.approx(0.002, rel=0.01), "mostly prompts: tells nothing"


def test_a_slow_host_favours_drafts() -> None:
    """A step takes it as long however many there are, so the more tokens the better."""
    policy = make_policy(TIMES, COUNTS)
    policy.decide(make_batch(64, 64))
    assert policy.num_drafts == 1
    observe(policy, 64, 0.0085, waited=0.0)
    assert policy.costs.added == 0 and policy.costs.host == pytest.approx(0.0085, rel=0.01)
    policy.decide(make_batch(64, 64))
    assert policy.num_drafts == 3


def test_a_slow_host_does_not_excuse_useless_drafts() -> None:
    """What they take the device is hidden by the host, but not all of it."""
    policy = make_policy(TIMES, COUNTS)
    policy.acceptance.add(3, 0, times=500)
    observe(policy, 8, 0.011, waited=0.0)
    policy.decide(make_batch(8, 8))
    assert policy.num_drafts == 0


def serve(
    policy: AdaptiveDrafts,
    num_reqs: int,
    took: dict[int, float],
    steps: int,
    waited: dict[int, float] | None = None,
    right: bool = True,
    prompts_every: int = 0,
) -> float:
    """Requests whose drafts are all right, or all wrong, in steps that take as long as told, by
    number of drafts; waited: of that, for the device. Returns tokens a second.

    prompts_every: so many steps a prompt makes one ten times as long
    """
    tokens, seconds = 0, 0.0
    for step in range(steps):
        if step % EVERY == 0:
            policy.decide(make_batch(num_reqs, num_reqs))
        count = policy.num_drafts
        num_tokens = 1 + count * right
        rows = [RowResult("r", 0, [1] * num_tokens, count)] * num_reqs
        prompts = bool(prompts_every) and step % prompts_every == 0
        # Beside a prompt a step drafts in any case.
        plan = StepPlan(step, [Row(True, count + 1)] * num_reqs, max(count, prompts))  # type: ignore[list-item]
        time = took[count] * (10 if prompts else 1)
        idle = (waited or {}).get(count, 0.0) * (10 if prompts else 1)
        policy.note(plan, StepResult(step, rows), StepTime(time, idle))
        tokens += num_reqs * num_tokens
        seconds += time
    return tokens / seconds


def test_what_only_many_drafts_cost_is_found_out() -> None:
    """With prompts beside them, batches of 4 tokens a request are too large for any graph."""
    policy = make_policy(TIMES, COUNTS)
    took = {0: 0.005, 1: 0.006, 3: 0.020}
    serve(policy, 64, took, 400)  # learns
    assert policy.num_drafts == 1
    assert serve(policy, 64, took, 20000) > 0.96 * 64 * 2 / took[1]
    took[3] = 0.0065  # fewer prompts, from now on
    serve(policy, 64, took, LAST_TRY + EVERY)
    assert policy.num_drafts == 3
    assert serve(policy, 64, took, 20000) > 0.98 * 64 * 4 / took[3]


def test_a_few_requests_more_or_fewer_end_no_trial() -> None:
    """Around a power of two: some end before others come."""
    policy = make_policy(TIMES, COUNTS)
    took = {0: 0.005, 1: 0.006, 3: 0.020}
    for turn in range(150):
        serve(policy, (62, 66)[turn % 2], took, EVERY)
    assert policy.num_drafts == 1


def test_fewer_drafts_that_the_host_bounds_are_found_out() -> None:
    """More of them are bound by the device."""
    policy = make_policy(TIMES, COUNTS)
    took, waited = {0: 0.005, 1: 0.006, 3: 0.020}, {3: 0.016}
    serve(policy, 64, took, 400, waited)
    assert policy.num_drafts == 1
    assert serve(policy, 64, took, 20000, waited) > 0.96 * 64 * 2 / took[1]


@pytest.mark.parametrize("host", [0.015, 0.020, 0.030])
def test_a_host_that_takes_many_times_as_long_as_graphs_favours_drafts(host: float) -> None:
    policy = make_policy(TIMES, COUNTS)
    took = dict.fromkeys(COUNTS, host)
    serve(policy, 64, took, 600)
    assert serve(policy, 64, took, 20000) > 0.97 * 64 * 4 / host


@pytest.mark.parametrize("prompts_every", [20, 250])
def test_prompts_beside_steps_without_drafts_do_not_keep_drafts_away(prompts_every: int) -> None:
    """Such steps make drafts for the prompts, but those are not what drafts cost."""
    policy = make_policy(TIMES, COUNTS)
    took = {count: TIMES.at(8, count) or 0.0 for count in COUNTS}
    waited = {count: 0.9 * seconds for count, seconds in took.items()}
    serve(policy, 8, took, 600, waited, right=False, prompts_every=prompts_every)
    assert policy.num_drafts == 0
    serve(policy, 8, took, 3 * LAST_GAP, waited, prompts_every=prompts_every)  # better ones
    assert policy.num_drafts == 3


def test_a_trial_ends_when_the_load_changes() -> None:
    policy = make_policy(TIMES, COUNTS)
    took = dict.fromkeys(COUNTS, 0.020)
    for _ in range(2 * FIRST_TRY // EVERY):
        serve(policy, 64, took, EVERY)
        if policy.costs.tries(64):
            break
    assert policy.num_drafts == 1
    policy.decide(make_batch(1000, 1000))
    assert policy.num_drafts == 0
    policy.decide(make_batch(4, 4))
    assert policy.num_drafts == 3


@pytest.mark.parametrize("every", [100, 400, 1000])
def test_a_load_that_swings_keeps_what_trials_found(every: int) -> None:
    """With 64 requests, 3 drafts take longer than their graph tells; with 16 they do not."""
    policy = make_policy(TIMES, COUNTS)
    took = {64: {0: 0.005, 1: 0.006, 3: 0.020}, 16: {c: TIMES.at(16, c) or 0 for c in COUNTS}}
    speeds: dict[int, list[float]] = {num_reqs: [] for num_reqs in took}
    for _ in range(20000 // every):
        for num_reqs, seconds in took.items():
            speeds[num_reqs].append(serve(policy, num_reqs, seconds, every))
    for num_reqs, best in ((64, 1), (16, 3)):
        late = statistics.mean(speeds[num_reqs][5000 // every :])
        assert late > 0.93 * num_reqs * (best + 1) / took[num_reqs][best]


def test_a_trial_of_fewer_drafts_costs_little() -> None:
    """Where more are faster all the same, as with contexts that are long."""
    policy = make_policy(TIMES, COUNTS)
    took = {0: 0.0110, 1: 0.0113, 3: 0.0120}
    serve(policy, 64, took, 600)
    assert policy.num_drafts == 3
    assert serve(policy, 64, took, 20000) > 0.98 * 64 * 4 / took[3]


def test_prompts_do_not_count_as_what_steps_take() -> None:
    """A step with a long prompt takes many times as long as it would without."""
    policy = make_policy(TIMES, COUNTS)
    policy.decide(make_batch(8, 8))
    observe(policy, 8, 5.0, waited=4.9)
    assert policy.costs.added <= 3 * TIMES.at(8, 3)  # type: ignore[operator]


def test_a_batch_of_worse_texts_gets_fewer() -> None:
    policy = make_policy(TIMES, COUNTS)
    policy.decide(make_batch(32, 32, scale=1.2))
    assert policy.num_drafts == 3
    policy.decide(make_batch(32, 32, scale=0.3))
    assert policy.num_drafts == 1


def test_drafts_that_no_request_asked_for_are_not_made() -> None:
    """A step that makes 3 drafts yields no more of requests that asked for 1."""
    policy = make_policy(TIMES, COUNTS)
    policy.decide(Batch(8, Counter({1: 8})))
    assert policy.num_drafts == 1
    policy.decide(Batch(8, Counter({1: 4, 3: 4})))
    assert policy.num_drafts == 3


# ---- what it reads of the scheduler ----


def make_running(
    prompts: Sequence[Sequence[int]], num_plain: int = 4, wanted: Sequence[int] = (), **options: Any
) -> Scheduler:
    """Requests that ran some steps without drafts, so that the drafter lacks KV of them."""
    options = {"num_drafts": 3, "drafter_has_kv": True, "max_num_seqs": len(prompts)} | options
    scheduler = make_scheduler(**options)
    for number, prompt in enumerate(prompts):
        drafts = wanted[number] if wanted else 3
        request = make_request(f"{number}", prompt, max_tokens=40, num_drafts=drafts)
        scheduler.add(request)
    take_step(scheduler)  # the prompts
    scheduler.num_places = scheduler.num_drafts = 0
    for _ in range(num_plain):
        take_step(scheduler)
    return scheduler


def wants_redraft(policy: AdaptiveDrafts, scheduler: Scheduler, times: int = 400) -> bool:
    """Whether it ever asks for what the drafter lacks."""
    for _ in range(times):
        policy.choose(scheduler)
        if scheduler.redraft:
            return True
    return False


@pytest.mark.parametrize(
    ("num_reqs", "right", "steps"),
    [(8, 0, 4), (31, 0, 4), (32, 0, 8), (64, 0, 16), (64, 1, 4)],
)
def test_many_requests_without_drafts_are_looked_at_less_often(
    num_reqs: int, right: int, steps: int
) -> None:
    policy = make_policy(TIMES, COUNTS)
    policy.acceptance.add(3, 3 * right, times=500)
    prompts = [[n + 1, 2] for n in range(num_reqs)]
    scheduler = make_running(prompts, 0, num_blocks=400, max_num_batched_tokens=512)
    decided, decide = [], policy.decide

    def count(batch: Batch, num_steps: int) -> bool:
        decided.append(num_steps)
        return decide(batch, num_steps)

    policy.decide = count  # type: ignore[method-assign,assignment]
    for _ in range(33):
        policy.choose(scheduler)
    assert bool(policy.num_drafts) == bool(right)
    assert len(decided) == 32 // steps + 1
    assert decided[1:] == [steps] * (32 // steps)


@pytest.mark.parametrize(("keeps_prefixes", "tokens"), [(True, 2 * 5), (False, 2 * 10)])
def test_it_counts_what_the_drafter_lacks(keeps_prefixes: bool, tokens: int) -> None:
    scheduler = make_running([[1] * 5, [2] * 5, [3] * 5], wanted=[3, 1, 0])
    policy = make_policy(TIMES, COUNTS, keeps_prefixes=keeps_prefixes)
    assert [each.num_drafter_kv for each in scheduler.running] == [5] * 3
    batch = policy._read_batch(scheduler)
    assert (batch.num_reqs, batch.drafted, batch.lacking) == (3, Counter(), Counter({3: 1, 1: 1}))
    assert batch.tokens_lacking == tokens
    assert wants_redraft(policy, scheduler)
    take_step(scheduler)
    batch = policy._read_batch(scheduler)
    assert (batch.drafted, batch.lacking, batch.tokens_lacking) == ({3: 1, 1: 1}, {}, 0)
    assert scheduler.stats.num_computed_again == 2


def test_requests_past_the_drafters_positions_are_left_alone() -> None:
    """To compute their tokens again would give them no drafts."""
    scheduler = make_running([[1] * 5], drafter_max_len=10)
    policy = make_policy(TIMES, COUNTS)
    assert scheduler.running[0].num_tokens == 10 and scheduler.undrafted == []
    assert policy._read_batch(scheduler) == Batch(1, Counter())
    assert not wants_redraft(policy, scheduler)
    shorter = make_running([[1] * 5], num_plain=3, drafter_max_len=10)
    assert shorter.undrafted == shorter.running and wants_redraft(policy, shorter)


def test_requests_that_would_lose_their_slot_are_left_alone() -> None:
    scheduler = make_running([[1] * 5])
    policy = make_policy(TIMES, COUNTS)
    urgent = make_request("urgent", [1], priority=-1, num_drafts=3)
    scheduler.add(urgent)
    assert scheduler.undrafted == [] and not wants_redraft(policy, scheduler)
    scheduler.finish(urgent, "abort")
    scheduler.add(make_request("later", [1], priority=1, num_drafts=3))
    assert scheduler.undrafted == scheduler.running and wants_redraft(policy, scheduler)


def test_requests_that_would_lose_their_blocks_are_left_alone() -> None:
    """What they give up to be computed again, other decodes may take."""
    scheduler = make_running([[1] * 5, [2] * 5])
    taken = scheduler.pool.allocate(scheduler.pool.num_free - 1)
    assert not wants_redraft(make_policy(TIMES, COUNTS), scheduler)
    scheduler.pool.release(taken)
    assert wants_redraft(make_policy(TIMES, COUNTS), scheduler)


def test_requests_that_would_wait_for_a_whole_step_are_left_alone() -> None:
    """Without chunked prefill a step must have room for all of their tokens."""
    for most, alone in ((40, True), (15, False)):
        options = {"chunked": False, "max_num_batched_tokens": most, "max_model_len": 15}
        scheduler = make_running([[1] * 5, [2] * 5], **options)
        assert scheduler.running[0].num_tokens == 10
        assert (
            bool(scheduler.undrafted)
            == alone
            == wants_redraft(make_policy(TIMES, COUNTS), scheduler)
        )
    assert make_running([[1] * 5], max_num_batched_tokens=8).undrafted, "in chunks"


def test_requests_whose_drafts_are_better_get_more() -> None:
    """All requests so far, and those in the batch."""
    scheduler = make_running([[1] * 5, [2] * 5], num_plain=0)
    policy = make_policy(TIMES, COUNTS)
    policy.acceptance.add(1, 1, times=250)
    policy.acceptance.add(1, 0, times=250)
    assert policy._read_batch(scheduler).scale == 1.0
    for request in scheduler.running:
        request.num_drafted, request.num_first_accepted = 1000, 900
    mean = policy.acceptance.rates[0]
    assert policy._read_batch(scheduler).scale == pytest.approx(0.9 / mean, rel=0.01)
    lookups = make_policy(TIMES, COUNTS, has_kv=False)
    assert lookups._read_batch(scheduler).scale == 1.0, "they count hits only"


def test_tokens_computed_again_are_no_hits_of_the_prefix_cache() -> None:
    """They would show a rate that no traffic has."""
    scheduler = make_running([[1] * 9], num_plain=4)
    cache, request = scheduler.prefix_cache, scheduler.running[0]
    before = (cache.num_queried_tokens, cache.num_hit_tokens)
    scheduler.redraft = True
    (admission,) = take_step(scheduler).admissions
    assert scheduler.stats.num_computed_again == 1 and admission.num_computed == 8
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == before == (9, 0)
    scheduler._preempt(request)
    take_step(scheduler)
    assert cache.num_queried_tokens == 9 + request.num_tokens - 1, "preemptions count"


def test_drafts_not_made_are_those_that_decodes_asked_for() -> None:
    scheduler = make_running([[1] * 5, [2] * 5, [3] * 5], num_plain=0, wanted=[3, 1, 0])
    take_step(scheduler)
    assert scheduler.stats.num_drafts_not_made == 3 + 1
    scheduler.num_places = scheduler.num_drafts = 1
    take_step(scheduler)
    assert scheduler.stats.num_drafts_not_made == 3 + 1 + 2
    alone = make_running([[1] * 9], num_plain=0, max_num_batched_tokens=4)
    assert take_step(alone).num_drafts == 1, "prompts get the drafter's KV"
    assert alone.stats.num_drafts_not_made == 0, "but no drafts"


# ---- drafters that look drafts up, and may find none ----


def look_up(hit_rate: float, rate: float) -> float:
    """Serve 8 requests. Returns tokens a second, relative to steps without drafts.

    A draft takes 0.3 steps, and a lookup finds all drafts or none.
    """
    times = StepTimes({(8, count): 1.0 + 0.3 * count for count in COUNTS})
    policy = make_policy(times, COUNTS, has_kv=False)
    scheduler = make_scheduler(num_blocks=9000, max_model_len=2000, max_num_seqs=8, num_drafts=3)
    for number in range(8):
        scheduler.add(make_request(f"{number}", [1], max_tokens=1999, num_drafts=3))
    source, found = random.Random(1), [0] * 8
    tokens = seconds = 0.0
    for step in range(400):
        policy.choose(scheduler)
        plan = scheduler.schedule()
        assert plan is not None
        rows = []
        for row in plan.rows:
            verified, accepted = min(found[row.slot], row.num_tokens - 1), 0
            while accepted < verified and source.random() < rate:
                accepted += 1
            rows.append(RowResult(row.request_id, row.epoch, [7] * (accepted + 1), verified))
            found[row.slot] = plan.num_drafts if source.random() < hit_rate else 0
            tokens += (accepted + 1) * (step >= 100)  # it learns before
        policy.note(plan, StepResult(step, rows), NO_TIME)
        scheduler.update(StepResult(step, rows))
        seconds += (1.0 + 0.3 * plan.num_drafts) * (step >= 100)
    return tokens / seconds / 8


def test_lookups_that_find_nothing_count_as_drafts_that_are_wrong() -> None:
    assert look_up(0.2, 0.9) > 0.93, "as fast as without drafts, but for probes"
    assert look_up(1.0, 0.9) > 1.5
    assert look_up(0.8, 0.9) > 1.25


def test_requests_that_want_no_drafts_miss_none() -> None:
    policy = make_policy(TIMES, COUNTS, has_kv=False)
    wants, declines = (PlannedRow("r", 0, 0, 4, 9, 13, 16, True, True, rules, 5) for rules in RULES)

    def misses(*rows: tuple[PlannedRow, list[int]], num_drafts: int = 3) -> float:
        before = policy.acceptance.rates[0]
        plan = StepPlan(1, [row for row, _ in rows], num_drafts)
        found = [RowResult("r", 0, tokens) for _, tokens in rows]
        policy.note(plan, StepResult(1, found), NO_TIME)
        after = policy.acceptance.rates[0]
        policy.acceptance = Acceptance([USUAL] * 3)
        return round(PRIOR * (before / after - 1))

    assert misses((wants, [1])) == 0, "there was no step before that could have drafted"
    assert misses((wants, [1]), (wants, [1])) == 2
    assert misses((wants, [1]), (declines, [1])) == 1
    assert misses((wants, [1]), (wants, [])) == 1, "the other has ended"
    assert misses((wants, [1]), num_drafts=0) == 1, "it had drafts, and makes none"
    assert misses((wants, [1])) == 0


# ---- what it says ----


def test_it_says_how_many_drafts_at_how_many_requests() -> None:
    assert make_policy(TIMES, COUNTS).describe() == (
        "3 drafts at 1 to 32 requests, 1 draft up to 64, none above 64"
    )
    slow = StepTimes({(size, count): 1.0 + count for size in (1, 8) for count in COUNTS})
    assert make_policy(slow, COUNTS).describe() == "none at any number of requests"
    fast = StepTimes({(size, count): 1.0 for size in (1, 8) for count in COUNTS})
    policy = make_policy(fast, COUNTS)
    assert policy.describe() == "3 drafts at 1 to 8 requests, none above 8"
    policy.decide(make_batch(9, 9))
    assert policy.num_drafts == 0, "as it says"
    alone = StepTimes({(1, count): 1.0 for count in COUNTS})
    assert make_policy(alone, COUNTS).describe() == "3 drafts at 1 request, none above 1"
