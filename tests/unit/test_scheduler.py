"""Single decisions of the scheduler, each in the smallest scene that shows it."""

import pytest

from stoop.config.errors import RequestError
from stoop.core.request import RequestStatus
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import RowResult, StepResult
from support.scheduling import (
    make_request,
    make_scheduler,
    result_of,
    rows_of,
    step,
    two_that_outgrow_the_pool,
)


def test_prompt_then_one_token_a_step() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2, 3], max_tokens=3)
    scheduler.add(request)
    assert rows_of(step(scheduler, 7)) == {"a": (0, 3)}
    assert rows_of(step(scheduler, 8)) == {"a": (3, 1)}
    assert rows_of(step(scheduler, 9)) == {"a": (4, 1)}
    assert request.output_token_ids == [7, 8, 9]
    assert request.finish_reason == "length"
    scheduler.check_idle()


def test_chunks_share_the_budget_and_only_the_last_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", range(10), max_tokens=2))
    plans = [step(scheduler) for _ in range(4)]
    assert [rows_of(plan)["a"] for plan in plans] == [(0, 4), (4, 4), (8, 2), (10, 1)]
    assert [plan.rows[0].samples for plan in plans] == [False, False, True, True]


def test_decodes_lead_and_are_not_held_up_by_a_long_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("long", range(40), priority=-1))
    scheduler.add(make_request("short", [1, 2]))
    step(scheduler)
    scheduler.abort("long")
    step(scheduler)
    scheduler.add(make_request("long2", range(40), priority=-1))
    for _ in range(3):
        plan = step(scheduler)
        assert [row.request_id for row in plan.rows] == ["short", "long2"]
        assert [row.num_tokens for row in plan.rows] == [1, 7]


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, chunked=False, max_model_len=10)
    scheduler.add(make_request("a", range(6), max_tokens=2))
    scheduler.add(make_request("b", range(9), max_tokens=1))
    assert rows_of(step(scheduler)) == {"a": (0, 6)}
    assert rows_of(step(scheduler)) == {"a": (6, 1), "b": (4, 5)}  # a's first block spares four


def test_nobody_jumps_a_queue_whose_head_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=7, max_model_len=24, prefix_caching=False)
    scheduler.add(make_request("a", range(10)))
    step(scheduler)
    scheduler.add(make_request("b", range(20)))
    scheduler.add(make_request("c", [1]))
    assert set(rows_of(step(scheduler))) == {"a"}
    scheduler.abort("b")
    assert set(rows_of(step(scheduler))) == {"a", "c"}


def test_lower_priority_number_goes_first_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        scheduler.add(make_request(name, [1, 2], max_tokens=1, priority=priority))
    assert [next(iter(rows_of(step(scheduler)))) for _ in range(4)] == ["d", "b", "c", "a"]


def test_rows_are_limited_by_slots() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [1], max_tokens=2))
    assert set(rows_of(step(scheduler))) == {"a", "b"}
    step(scheduler)
    assert set(rows_of(step(scheduler))) == {"c"}


# ---- blocks to zero ----


def test_blocks_are_listed_for_zeroing_only_if_asked() -> None:
    for asked in (False, True):
        scheduler = make_scheduler(zero_new_blocks=asked, prefix_caching=False)
        scheduler.add(make_request("a", range(6), max_tokens=5))
        plans = [step(scheduler) for _ in range(4)]
        # Two blocks of four for the prompt; the third when the ninth token is computed.
        assert [len(plan.blocks_to_zero) for plan in plans] == ([2, 0, 0, 1] if asked else [0] * 4)
        given = [block for plan in plans for each in plan.block_appends for block in each.block_ids]
        assert [b for plan in plans for b in plan.blocks_to_zero] == (given if asked else [])


def test_cached_prefixes_are_not_listed_for_zeroing() -> None:
    scheduler = make_scheduler(zero_new_blocks=True)
    for name in ("first", "second"):
        scheduler.add(make_request(name, range(10), max_tokens=1))
        plan = step(scheduler)
    (append,) = plan.block_appends
    assert plan.admissions[0].num_computed == 8
    assert plan.blocks_to_zero == append.block_ids[2:] and len(plan.blocks_to_zero) == 1


def test_a_block_that_changes_hands_within_planning_is_listed_once() -> None:
    """The later request gets the last free block and is preempted for the earlier one, which
    takes that block."""
    scheduler = make_scheduler(num_blocks=1 + 5, zero_new_blocks=True, prefix_caching=False)
    low = make_request("low", range(7), max_tokens=20, priority=1)
    scheduler.add(low)
    step(scheduler)
    scheduler.add(make_request("high", range(8), max_tokens=20))
    step(scheduler)  # five blocks: low has two, high has two, and low's ninth token takes the last
    order = scheduler._order_running
    scheduler._order_running = lambda: order()[::-1]  # type: ignore[method-assign]
    plan = step(scheduler)
    assert low.num_preemptions == 1 and [row.request_id for row in plan.rows] == ["high"]
    (append,) = plan.block_appends
    assert plan.blocks_to_zero == append.block_ids and len(append.block_ids) == 1


# ---- preemption ----


def test_last_in_order_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler, first, second = two_that_outgrow_the_pool()
    while not scheduler.stats.num_preemptions:
        plan = step(scheduler, lambda name: 20 if name == "first" else 30)
    assert set(rows_of(plan)) == {"first"}
    assert second.status is RequestStatus.WAITING and second.num_preemptions == 1
    assert (second.slot, second.block_ids, second.num_computed) == (-1, [], 0)
    generated = second.output_token_ids
    assert generated and set(generated) == {30}
    while second.status is RequestStatus.WAITING:
        plan = step(scheduler, lambda name: 20 if name == "first" else 30)
    admission = plan.admissions[0]
    assert admission.token_ids == [4, 5, 6, *generated]
    assert admission.num_prompt_tokens == 3
    assert rows_of(plan)["second"] == (0, 3 + len(generated))
    while scheduler.has_work:
        step(scheduler, lambda name: 20 if name == "first" else 30)
    assert first.output_token_ids == [20] * 8 and second.output_token_ids == [30] * 8
    scheduler.check_idle()


def test_priority_outweighs_arrival_in_preemption() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=2, max_model_len=12, prefix_caching=False)
    early, late = make_request("early", [1, 2, 3], priority=1), make_request("late", [4, 5, 6])
    scheduler.add(early)
    scheduler.add(late)
    while not scheduler.stats.num_preemptions:
        step(scheduler)
    assert early.status is RequestStatus.WAITING and late.status is RequestStatus.RUNNING


def test_a_prompt_may_take_a_decodes_blocks_in_the_same_step() -> None:
    """The decode's row is already in the plan when its blocks are taken: it must go again."""
    scheduler = make_scheduler(
        num_blocks=13, block_size=1, max_model_len=12, max_num_batched_tokens=4
    )
    scheduler.add(make_request("decode", [1, 2], max_tokens=10, priority=1))
    step(scheduler)
    scheduler.add(make_request("prompt", range(20, 28), max_tokens=2))
    plans = []
    while not scheduler.stats.num_preemptions:
        plans.append(step(scheduler))
    assert set(rows_of(plans[-2])) == {"decode", "prompt"}
    assert set(rows_of(plans[-1])) == {"prompt"}
    assert plans[-1].num_tokens == 4 or plans[-1].rows[0].samples
    while scheduler.has_work:
        step(scheduler)
    scheduler.check_idle()


def test_full_pool_preempts_in_reverse_order() -> None:
    scheduler = make_scheduler(num_blocks=13, block_size=1, max_model_len=12, max_num_seqs=3)
    requests = [make_request(name, [i], max_tokens=11) for i, name in enumerate("abc")]
    for request in requests:
        scheduler.add(request)
    left = []
    while scheduler.has_work:
        running = [r for r in requests if r.status is RequestStatus.RUNNING]
        step(scheduler)
        left += [r.request_id for r in running if r.status is RequestStatus.WAITING]
    assert left[:2] == ["c", "b"] and "a" not in left


# ---- refusals ----


def test_prompt_at_the_models_limit_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=8)
    with pytest.raises(RequestError, match="max_model_len=8"):
        scheduler.add(make_request("a", range(8)))
    scheduler.add(make_request("a", range(7)))
    assert rows_of(scheduler.schedule()) == {"a": (0, 7)}


def test_prompt_beyond_the_cache_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4, max_model_len=64)
    with pytest.raises(RequestError, match="KV cache holds 8"):
        scheduler.add(make_request("a", range(8)))
    assert not scheduler.has_work


def test_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], max_tokens=1))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(make_request("a", [2]))
    step(scheduler)
    scheduler.add(make_request("a", [3], max_tokens=1))
    assert rows_of(step(scheduler)) == {"a": (0, 1)}
    scheduler.check_idle()


# ---- ends ----


def test_model_limit_ends_an_answer() -> None:
    scheduler = make_scheduler(max_model_len=8)
    request = make_request("a", range(5), max_tokens=100)
    scheduler.add(request)
    while scheduler.has_work:
        plan = step(scheduler)
        assert all(row.seq_len <= 7 for row in plan.rows)  # the last token is never computed
    assert request.num_tokens == 8 and request.finish_reason == "length"


def test_stop_token_ends_an_answer_but_not_before_min_tokens() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(temperature=0.0, min_tokens=2)
    request = make_request("a", [1], params=params, stop_ids=(7,))
    scheduler.add(request)
    for token in (7, 7, 7):
        assert not request.finished
        step(scheduler, token)
    assert (request.finish_reason, request.stop_reason) == ("stop", 7)
    assert request.output_token_ids == [7, 7, 7]


def test_tokens_after_a_stop_in_one_result_are_dropped() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1], stop_ids=(7,))
    scheduler.add(request)
    plan = scheduler.schedule()
    row = plan.rows[0]
    scheduler.update(StepResult(plan.index, [RowResult("a", row.epoch, [5, 7, 6])]))
    assert request.output_token_ids == [5, 7]
    scheduler.check_idle()


@pytest.mark.parametrize("moment", ["waiting", "scheduled", "running"])
def test_abort_at_any_moment_gives_everything_back(moment: str) -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2, 3])
    scheduler.add(request)
    plan = None
    if moment != "waiting":
        plan = scheduler.schedule()
    if moment == "running":
        scheduler.update(result_of(plan))
        plan = None
    assert scheduler.abort("a") is request
    if plan is not None:
        assert scheduler.update(result_of(plan)) == []
    assert request.finish_reason == "abort"
    scheduler.check_idle()


def test_abort_of_nobody_is_nothing() -> None:
    assert make_scheduler().abort("nobody") is None


def test_second_finish_is_ignored() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1], max_tokens=1)
    scheduler.add(request)
    step(scheduler)
    scheduler.finish(request, "abort")
    assert request.finish_reason == "length" and scheduler.stats.num_finished == 1
    scheduler.check_idle()


# ---- late results ----


def test_late_result_of_an_aborted_request_is_ignored() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    old, new = make_request("old", [1, 2]), make_request("new", [3, 4])
    scheduler.add(old)
    scheduler.add(new)
    late = result_of(scheduler.schedule(), 50)
    scheduler.abort("old")
    plan = scheduler.schedule()  # the slot is the other's now
    assert plan.rows[0].slot == 0
    assert scheduler.update(late) == []
    assert old.output_token_ids == [] and new.output_token_ids == []
    scheduler.update(result_of(plan, 60))
    assert new.output_token_ids == [60]


def test_late_result_of_a_preempted_request_is_ignored() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=1, max_model_len=9, prefix_caching=False)
    first, second = make_request("first", [1, 2, 3, 4]), make_request("second", [5, 6, 7])
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    result = result_of(scheduler.schedule(), 50)  # the pool is full now
    rows = {row.request_id: row for row in result.rows}
    scheduler.update(StepResult(result.index, [rows["first"]]))
    assert rows_of(scheduler.schedule()) == {"first": (5, 1)}
    assert second.num_preemptions == 1
    late = StepResult(result.index, [rows["second"]])
    assert scheduler.update(late) == []
    assert second.output_token_ids == [7]


def test_late_result_is_not_taken_by_the_ids_next_owner() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    late = result_of(scheduler.schedule(), 50)
    scheduler.abort("a")
    new = make_request("a", [3, 4])
    scheduler.add(new)
    assert scheduler.update(late) == []
    assert new.output_token_ids == []


def test_stats_count() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=2))
    while scheduler.has_work:
        step(scheduler)
    stats = scheduler.stats
    assert (stats.num_steps, stats.num_finished, stats.num_preemptions) == (2, 1, 0)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (3, 2)
