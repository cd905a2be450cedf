"""Decisions of the scheduler with drafts, and with results of earlier steps outstanding."""

from typing import Any

import pytest

from stoop.core.outputs import SpecCounts
from stoop.core.request import RequestStatus
from stoop.core.step import RowResult, StepPlan, StepResult
from stoop.scheduler.scheduler import Scheduler
from support.scheduling import (
    make_request,
    make_scheduler,
    result_of,
    rows_of,
    two_that_outgrow_the_pool,
)

# ---- speculation ----

K = 3


def speculative(**options: Any) -> Scheduler:
    return make_scheduler(**{"num_drafts": K, "drafter_has_kv": True, **options})


def verdict(plan: StepPlan, tokens: dict[str, list[int]], num_drafts: int = K) -> StepResult:
    """A worker that accepts all but one of `tokens`; decodes alone have drafts."""
    rows = []
    for row in plan.rows:
        found = tokens[row.request_id] if row.samples else []
        drafts = num_drafts if row.decodes else 0
        rows.append(RowResult(row.request_id, row.epoch, found, num_drafts=drafts))
    return StepResult(plan.index, rows)


def spec_step(scheduler: Scheduler, num_drafts: int = K, **tokens: list[int]) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(verdict(plan, tokens, num_drafts))
    return plan


def test_a_decode_has_places_for_all_drafts_whatever_was_accepted() -> None:
    scheduler = speculative()
    request = make_request("a", [1, 2, 3], max_tokens=20, num_drafts=K)
    scheduler.add(request)
    plan = spec_step(scheduler, a=[10])
    assert rows_of(plan) == {"a": (0, 3)} and not plan.rows[0].decodes
    computed = 3
    for tokens in ([11], [12, 13], [14, 15, 16, 17], [18, 19, 20]):
        plan = spec_step(scheduler, a=tokens)
        row = plan.rows[0]
        assert rows_of(plan) == {"a": (computed, K + 1)}
        assert (row.decodes, row.samples) == (True, True)
        assert row.seq_len == computed + K + 1
        assert row.num_reserved == 4 * len(request.block_ids) >= computed + K + 1 + K - 1
        computed += len(tokens)
        assert request.num_computed == computed == request.num_tokens - 1
    assert request.output_token_ids == list(range(10, 21))


@pytest.mark.parametrize(("drafter_has_kv", "lookahead"), [(True, K - 1), (False, 0)])
def test_blocks_cover_what_a_drafter_writes(drafter_has_kv: bool, lookahead: int) -> None:
    scheduler = speculative(block_size=1, drafter_has_kv=drafter_has_kv, prefix_caching=False)
    request = make_request("a", [1, 2, 3], max_tokens=30, num_drafts=K)
    scheduler.add(request)
    plan = spec_step(scheduler, a=[10])
    assert len(request.block_ids) == 3 + lookahead
    plan = spec_step(scheduler, a=[11])  # all drafts rejected: the next step needs one block more
    assert len(request.block_ids) == plan.rows[0].num_reserved == 3 + K + 1 + lookahead
    plan = spec_step(scheduler, a=[12, 13, 14, 15])
    assert plan.block_appends[0].start == 3 + K + 1 + lookahead
    assert len(plan.block_appends[0].block_ids) == 1


def test_rows_at_the_models_limit_reserve_no_more_than_there_is() -> None:
    limit = 12
    scheduler = speculative(block_size=2, max_model_len=limit, num_blocks=7, max_num_seqs=1)
    request = make_request("a", range(1, 8), max_tokens=100, num_drafts=K)
    scheduler.add(request)
    token, rows = 20, []
    while scheduler.has_work:
        rows += spec_step(scheduler, a=[token]).rows
        token += 1
    assert [row.seq_len for row in rows] == [7, 11, 12, 12, 12]
    assert [row.num_reserved for row in rows] == [10, 12, 12, 12, 12]  # whole blocks
    assert request.num_tokens == limit and request.finish_reason == "length"
    scheduler.check_idle()


def test_a_run_that_reaches_the_models_limit_ends_the_answer() -> None:
    scheduler = speculative(max_model_len=12)
    request = make_request("a", range(1, 9), max_tokens=100, num_drafts=K)
    scheduler.add(request)
    spec_step(scheduler, a=[20])
    spec_step(scheduler, num_drafts=2, a=[21, 22, 23])
    assert request.output_token_ids == [20, 21, 22, 23]
    assert (request.num_tokens, request.finish_reason) == (12, "length")
    scheduler.check_idle()


def test_a_run_ends_where_max_tokens_is_reached() -> None:
    scheduler = speculative()
    request = make_request("a", [1, 2], max_tokens=3, num_drafts=K)
    scheduler.add(request)
    spec_step(scheduler, a=[5])
    spec_step(scheduler, a=[6, 7, 8, 9])
    assert request.output_token_ids == [5, 6, 7] and request.finish_reason == "length"
    scheduler.check_idle()


def test_a_stop_token_inside_a_run_drops_what_follows() -> None:
    scheduler = speculative()
    request = make_request("a", [1, 2], max_tokens=20, num_drafts=K, stop_ids=(7,))
    scheduler.add(request)
    spec_step(scheduler, a=[5])
    spec_step(scheduler, a=[6, 7, 8, 9])
    assert request.output_token_ids == [5, 6, 7]
    assert (request.finish_reason, request.stop_reason) == ("stop", 7)
    scheduler.check_idle()


def test_every_decode_counts_its_places_against_the_budget() -> None:
    scheduler = speculative(max_num_seqs=3, max_num_batched_tokens=3 * (K + 1))
    scheduler.add(make_request("a", [1, 2], num_drafts=K))
    scheduler.add(make_request("b", [3, 4], num_drafts=K))
    spec_step(scheduler, a=[5], b=[5])
    scheduler.add(make_request("long", range(40, 60), num_drafts=K))
    plan = spec_step(scheduler, a=[6], b=[6], long=[6])
    assert rows_of(plan) == {"a": (2, 4), "b": (2, 4), "long": (0, 4)}
    assert plan.num_tokens == 12
    assert [row.decodes for row in plan.rows] == [True, True, False]


def test_a_prompts_last_token_alone_has_no_places_for_drafts() -> None:
    scheduler = speculative(max_num_seqs=1, max_num_batched_tokens=K + 1)
    scheduler.add(make_request("a", range(K + 2), num_drafts=K))
    assert rows_of(spec_step(scheduler)) == {"a": (0, K + 1)}
    plan = spec_step(scheduler, a=[9])
    assert rows_of(plan) == {"a": (K + 1, 1)}
    assert not plan.rows[0].decodes and plan.rows[0].samples
    assert rows_of(spec_step(scheduler, a=[9])) == {"a": (K + 2, K + 1)}


def test_a_resumed_request_is_a_decode_only_with_all_its_places() -> None:
    """The prefix cache may leave a resumed request one token, as a decode has: graphs of decodes
    take `K + 1` tokens from each row and no others."""
    scheduler = speculative(block_size=1, drafter_has_kv=False)
    request = make_request("a", [1, 2], max_tokens=20, num_drafts=K)
    scheduler.add(request)
    spec_step(scheduler, a=[5])
    spec_step(scheduler, a=[6])
    scheduler._preempt(request)
    row = scheduler.schedule().rows[0]
    assert row.num_computed == 3 == request.num_tokens - 1
    assert not row.decodes or row.num_tokens == K + 1


def test_preempted_request_resumes_with_accepted_tokens_only() -> None:
    scheduler = speculative(num_blocks=13, block_size=2, max_model_len=24, prefix_caching=False)
    first = make_request("first", [1, 2, 3], max_tokens=18, num_drafts=K)
    second = make_request("second", [4, 5, 6], max_tokens=18, num_drafts=K)
    scheduler.add(first)
    scheduler.add(second)
    spec_step(scheduler, first=[20], second=[30])
    while not second.num_preemptions:
        plan = spec_step(scheduler, first=[20, 20], second=[30, 30])
    assert set(rows_of(plan)) == {"first"}
    assert (second.slot, second.block_ids, second.num_computed) == (-1, [], 0)
    assert set(second.output_token_ids) == {30} and second.num_output_tokens % 2 == 1
    known = list(second.token_ids)
    while second.status is RequestStatus.WAITING:
        plan = spec_step(scheduler, first=[20, 20], second=[30, 30])
    admission = plan.admissions[0]
    assert admission.token_ids == known and admission.num_computed == 0
    row = next(row for row in plan.rows if row.request_id == "second")
    assert (row.num_tokens, row.decodes) == (len(known), False)
    while scheduler.has_work:
        spec_step(scheduler, first=[20, 20], second=[30, 30])
    assert first.output_token_ids == [20] * 18 and second.output_token_ids == [30] * 18
    scheduler.check_idle()


# ---- run-ahead: steps planned before the results of earlier ones are known ----


def ahead(scheduler: Scheduler) -> StepPlan | None:
    return scheduler.schedule(results_pending=True)


def test_a_step_under_way_counts_for_all_that_it_may_yield() -> None:
    """How many drafts were accepted is not known before the result is in."""
    scheduler = speculative()
    request = make_request("a", [1, 2], max_tokens=20, num_drafts=K)
    scheduler.add(request)
    first = scheduler.schedule()
    plans = [ahead(scheduler) for _ in range(2)]
    assert [rows_of(plan) for plan in plans] == [{"a": (2, K + 1)}, {"a": (2 + K + 1, K + 1)}]
    assert list(request.in_flight) == [1, K + 1, K + 1]
    assert (request.num_expected, request.num_due) == (3 + 2 * (K + 1), 3)
    assert all(plan.rows[0].decodes and plan.rows[0].samples for plan in plans)
    # Blocks for the bound, and for what the drafter writes behind it.
    assert plans[-1].rows[0].seq_len == 2 + 2 * (K + 1)
    assert plans[-1].rows[0].num_reserved >= 2 + 2 * (K + 1) + K - 1
    scheduler.update(verdict(first, {"a": [5]}))
    scheduler.update(verdict(plans[0], {"a": [6, 7]}))  # two fewer than there might have been
    assert list(request.in_flight) == [K + 1]
    assert request.num_computed == 4 + K + 1 and request.num_expected == 5 + K + 1
    assert rows_of(ahead(scheduler)) == {"a": (4 + K + 1, K + 1)}


def test_chunks_run_ahead_and_yield_nothing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = make_request("a", range(10), max_tokens=3)
    scheduler.add(request)
    plans = [scheduler.schedule(), *(ahead(scheduler) for _ in range(4))]
    assert [rows_of(p)["a"] for p in plans] == [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1)]
    assert [p.rows[0].samples for p in plans] == [False, False, True, True, True]
    assert list(request.in_flight) == [0, 0, 1, 1, 1]
    assert ahead(scheduler) is None  # the three tokens that it wants are under way
    for plan in plans:
        assert not request.finished
        scheduler.update(result_of(plan))
    assert request.output_token_ids == [7, 7, 7]
    scheduler.check_idle()


def test_a_decode_that_is_cut_short_may_yield_no_more_than_its_places() -> None:
    scheduler = speculative(max_num_seqs=2, max_num_batched_tokens=6, block_size=1)
    for name in "ab":
        scheduler.add(make_request(name, [1], max_tokens=20, num_drafts=K))
    spec_step(scheduler, a=[5], b=[5])
    plan = scheduler.schedule()
    assert sorted(row.num_tokens for row in plan.rows) == [2, 4]
    assert sorted(r.in_flight[0] for r in scheduler.running) == [2, 4]


@pytest.mark.parametrize(("limit", "max_tokens"), [(64, 4), (6, 100)])
def test_a_request_that_is_sure_to_end_is_planned_no_further(limit: int, max_tokens: int) -> None:
    """By its own limit or the model's; others go on."""
    scheduler = make_scheduler(max_model_len=limit)
    scheduler.add(make_request("a", [1, 2], max_tokens=max_tokens))
    scheduler.add(make_request("b", [1], max_tokens=5))
    plans = [scheduler.schedule(), *(ahead(scheduler) for _ in range(4))]
    assert [sorted(rows_of(plan)) for plan in plans] == [["a", "b"]] * 4 + [["b"]]
    assert ahead(scheduler) is None
    for plan in plans:
        scheduler.update(result_of(plan))
    scheduler.check_idle()


def test_drafts_may_end_a_request_earlier_than_is_sure() -> None:
    """Three tokens to go, two steps under way: each must yield one, so a third is planned."""
    scheduler = speculative()
    request = make_request("a", [1, 2], max_tokens=4, num_drafts=K)
    scheduler.add(request)
    spec_step(scheduler, a=[5])
    plans = [scheduler.schedule(), ahead(scheduler), ahead(scheduler)]
    assert all(plans) and ahead(scheduler) is None
    scheduler.update(verdict(plans[0], {"a": [6, 7, 8]}))
    assert request.finish_reason == "length"
    for plan in plans[1:]:
        late = [RowResult("a", plan.rows[0].epoch, [])]
        assert scheduler.update(StepResult(plan.index, late)) == []
    assert request.output_token_ids == [5, 6, 7, 8]
    scheduler.check_idle()


def test_nobody_is_preempted_while_results_are_under_way() -> None:
    """The engine reads a result and asks again; with none under way the last one goes."""
    scheduler, first, second = two_that_outgrow_the_pool()
    plans = [scheduler.schedule()]
    while (plan := ahead(scheduler)) is not None:
        plans.append(plan)
    assert len(plans) == 4 and not scheduler.stats.num_preemptions  # three blocks of two each
    assert scheduler.pool.num_free == 0
    for plan in plans:
        assert ahead(scheduler) is None
        scheduler.update(result_of(plan))
    plan = scheduler.schedule()
    assert set(rows_of(plan)) == {"first"} and second.num_preemptions == 1
    assert not second.in_flight and len(first.in_flight) == 1


def test_a_result_that_frees_blocks_ends_the_wait() -> None:
    """The longer bound of a step under way is given up when drafts were rejected."""
    scheduler = speculative(num_blocks=13, block_size=1, max_model_len=12, drafter_has_kv=False)
    scheduler.add(make_request("a", [1], max_tokens=11, num_drafts=K))
    scheduler.add(make_request("b", [2], max_tokens=2, num_drafts=K))
    first = scheduler.schedule()
    second = ahead(scheduler)
    assert ahead(scheduler) is None
    scheduler.update(verdict(first, {"a": [5], "b": [5]}))
    scheduler.update(verdict(second, {"a": [6], "b": [6]}))  # b has ended
    assert rows_of(ahead(scheduler)) == {"a": (2, K + 1)}
    assert not scheduler.stats.num_preemptions


def test_an_arrival_is_admitted_while_results_are_under_way() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(make_request("a", [1, 2]))
    first = scheduler.schedule()
    scheduler.add(make_request("b", [3, 4, 5]))
    assert rows_of(ahead(scheduler)) == {"a": (2, 1), "b": (0, 3)}
    scheduler.update(result_of(first))
    assert rows_of(ahead(scheduler)) == {"a": (3, 1), "b": (3, 1)}


def test_a_slot_is_reused_while_a_step_of_its_former_holder_is_under_way() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("old", [1, 2], stop_ids=(7,)))
    new = make_request("new", [3, 4])
    scheduler.add(new)
    first, second = scheduler.schedule(), ahead(scheduler)
    scheduler.update(result_of(first, 7))
    plan = ahead(scheduler)
    assert plan.rows[0].slot == second.rows[0].slot and rows_of(plan) == {"new": (0, 2)}
    assert scheduler.update(result_of(second, 50)) == []
    assert new.token_ids == [3, 4] and list(new.in_flight) == [1]
    scheduler.update(result_of(plan, 60))
    assert new.output_token_ids == [60]


def test_with_nothing_to_do_there_is_no_plan() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule() is None and ahead(scheduler) is None
    assert scheduler.stats.num_steps == 0


def test_a_block_that_ends_in_the_newest_token_is_offered_with_the_next_result() -> None:
    """The step under way would write its last place, but may find the request ended."""
    scheduler = make_scheduler(block_size=2)
    request = make_request("a", [1, 2, 3], max_tokens=20)
    scheduler.add(request)
    plans = [scheduler.schedule(), ahead(scheduler), ahead(scheduler)]
    scheduler.update(result_of(plans[0]))
    assert request.num_computed == 5 and request.num_tokens == 4
    assert len(scheduler.prefix_cache) == 1
    scheduler.update(result_of(plans[1]))
    assert len(scheduler.prefix_cache) == 2


def test_late_drafts_of_a_preempted_request_are_ignored() -> None:
    scheduler = speculative()
    request = make_request("a", [1, 2], max_tokens=20, num_drafts=K)
    scheduler.add(request)
    spec_step(scheduler, a=[5])
    late = verdict(scheduler.schedule(), {"a": [6, 7, 8]})
    scheduler._preempt(request)
    assert scheduler.update(late) == []
    assert request.output_token_ids == [5] and scheduler.stats.spec.num_drafts == 0


def test_spec_stats_count_drafts_by_request_and_in_all() -> None:
    scheduler = speculative()
    a = make_request("a", [1, 2], max_tokens=20, num_drafts=K)
    b = make_request("b", [3, 4], max_tokens=20)
    scheduler.add(a)
    scheduler.add(b)
    spec_step(scheduler, a=[5], b=[5])
    told = {"a": SpecCounts(K), "b": SpecCounts(K)}
    for tokens in ([6], [6, 7, 8, 9], [6, 7, 8]):
        plan = scheduler.schedule()
        rows = [
            RowResult("a", a.epoch, tokens, num_drafts=K),
            RowResult("b", b.epoch, [6], num_drafts=0),  # it wants none
        ]
        for delta in scheduler.update(StepResult(plan.index, rows)):
            if delta.num_drafts:
                told[delta.request_id].add(delta.num_drafts, delta.num_accepted)
    for spec in (told["a"], scheduler.stats.spec):
        steps = spec.num_drafts
        assert (steps, spec.num_draft_tokens, spec.num_accepted_tokens) == (3, 9, 5)
        assert spec.num_accepted_tokens_per_pos == [2, 2, 1]
        assert spec.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert told["b"].num_drafts == 0
    assert told["b"].num_accepted_tokens_per_pos == [0] * K
