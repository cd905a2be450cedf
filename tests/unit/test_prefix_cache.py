"""Which blocks a prompt may take over from others, and which it must not."""

from collections.abc import Sequence
from typing import Any

import pytest

from stoop.core.sampling_params import SamplingParams
from stoop.core.step import RowResult, StepResult
from stoop.scheduler import prefix_cache as prefix_cache_module
from stoop.scheduler.prefix_cache import block_digest
from stoop.scheduler.scheduler import Scheduler
from support.scheduling import make_request, make_scheduler, result_of, rows_of, step

A, B, X = [1, 1], [2, 2], [3, 3]


def finish_prompt(scheduler: Scheduler, name: str, prompt: list[int]) -> list[int]:
    """Run a prompt for one token; returns the blocks that it used."""
    scheduler.add(make_request(name, prompt, max_tokens=1))
    plan = step(scheduler, token=9)
    assert not scheduler.has_work
    return plan.block_appends[0].block_ids


def test_shared_prefix_is_computed_once() -> None:
    scheduler = make_scheduler(block_size=4)
    blocks = finish_prompt(scheduler, "a", list(range(10)))
    scheduler.add(make_request("b", [*range(8), 99, 98]))
    plan = scheduler.schedule()
    assert rows_of(plan) == {"b": (8, 2)}
    assert plan.admissions[0].num_computed == 8
    assert plan.block_appends[0].block_ids[:2] == blocks[:2]


def test_a_difference_inside_a_block_ends_the_match() -> None:
    scheduler = make_scheduler(block_size=4)
    finish_prompt(scheduler, "a", list(range(10)))
    scheduler.add(make_request("b", [0, 1, 2, 3, 4, 5, 99, 7, 8, 9]))
    assert rows_of(scheduler.schedule()) == {"b": (4, 6)}


def test_same_tokens_at_another_place_are_no_match() -> None:
    scheduler = make_scheduler(block_size=2)
    finish_prompt(scheduler, "a", [*A, *X, 5])
    scheduler.add(make_request("b", [*X, *A, 5]))
    scheduler.add(make_request("c", [*B, *X, 5]))
    assert rows_of(scheduler.schedule()) == {"b": (0, 5), "c": (0, 5)}


def test_prompt_known_in_full_still_computes_a_token() -> None:
    scheduler = make_scheduler(block_size=4)
    finish_prompt(scheduler, "a", list(range(8)))
    scheduler.add(make_request("b", list(range(8))))
    plan = scheduler.schedule()
    assert rows_of(plan) == {"b": (4, 4)}  # whole blocks only, and the last is wanted
    assert plan.rows[0].samples


def test_block_size_one_leaves_exactly_one_token() -> None:
    scheduler = make_scheduler(block_size=1)
    finish_prompt(scheduler, "a", [4, 5, 6])
    scheduler.add(make_request("b", [4, 5, 6]))
    assert rows_of(scheduler.schedule()) == {"b": (2, 1)}


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler = make_scheduler(block_size=2)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=4))
    for token in (10, 11, 12, 13):
        step(scheduler, token)
    # 13 was sampled but never computed, so the block (12, 13) is not known.
    scheduler.add(make_request("b", [1, 2, 3, 10, 11, 12, 13, 14, 15]))
    assert rows_of(scheduler.schedule()) == {"b": (6, 3)}


def test_a_finish_at_a_block_boundary_offers_only_what_was_computed() -> None:
    scheduler = make_scheduler(block_size=2)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=1))
    step(scheduler, 10)
    assert len(scheduler.prefix_cache) == 1  # (1, 2); 10 is known but has no KV
    scheduler.add(make_request("b", [1, 2, 3, 10, 5]))
    assert rows_of(scheduler.schedule()) == {"b": (2, 3)}


def test_stop_token_path_offers_the_full_block() -> None:
    scheduler = make_scheduler(block_size=2)
    scheduler.add(make_request("a", [1, 2, 3, 4], stop_ids=(7,)))
    step(scheduler, 7)
    assert not scheduler.has_work and len(scheduler.prefix_cache) == 2


def test_nothing_is_offered_before_the_result_is_in() -> None:
    scheduler = make_scheduler(block_size=2)
    scheduler.add(make_request("a", [1, 2, 3, 4, 5]))
    plan = scheduler.schedule()
    assert len(scheduler.prefix_cache) == 0
    scheduler.update(result_of(plan))
    assert len(scheduler.prefix_cache) == 2


def test_aborted_request_offers_nothing_new() -> None:
    scheduler = make_scheduler(block_size=2)
    scheduler.add(make_request("a", [1, 2, 3, 4, 5]))
    plan = scheduler.schedule()
    scheduler.abort("a")
    scheduler.update(result_of(plan))
    assert len(scheduler.prefix_cache) == 0


def test_disabled_cache_finds_and_keeps_nothing() -> None:
    scheduler = make_scheduler(block_size=2, prefix_caching=False)
    finish_prompt(scheduler, "a", [1, 2, 3, 4, 5])
    assert len(scheduler.prefix_cache) == 0
    scheduler.add(make_request("b", [1, 2, 3, 4, 5]))
    assert rows_of(scheduler.schedule()) == {"b": (0, 5)}


def test_prompt_scores_need_the_whole_prompt_computed() -> None:
    scheduler = make_scheduler(block_size=2)
    finish_prompt(scheduler, "a", [1, 2, 3, 4, 5])
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    scheduler.add(make_request("b", [1, 2, 3, 4, 5], params=params))
    assert rows_of(scheduler.schedule()) == {"b": (0, 5)}


def test_hit_counters() -> None:
    scheduler = make_scheduler(block_size=2)
    finish_prompt(scheduler, "a", [1, 2, 3, 4, 5])
    request = make_request("b", [1, 2, 3, 4, 6])
    scheduler.add(request)
    scheduler.schedule()
    cache = scheduler.prefix_cache
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (10, 4)
    assert request.num_cached == 4


def test_least_recently_used_prefix_is_evicted_first() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=2, max_model_len=12)
    finish_prompt(scheduler, "a", [*A, 8])  # each leaves one cached block of six
    finish_prompt(scheduler, "b", [*B, 8])
    finish_prompt(scheduler, "a2", [*A, 7])  # now a is the more recent one
    finish_prompt(scheduler, "long", [5, 5, 6, 6, 7, 7, 8, 8, 9])  # takes five
    assert finish_prompt_hits(scheduler, [*A, 6]) == 2
    assert finish_prompt_hits(scheduler, [*B, 6]) == 0


def finish_prompt_hits(scheduler: Scheduler, prompt: list[int]) -> int:
    """Tokens that the cache would spare, without running the prompt."""
    return len(scheduler.prefix_cache.match(make_request("probe", prompt))) * 2


def test_evicted_block_is_forgotten() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, max_model_len=6)
    finish_prompt(scheduler, "a", [*A, 8])
    finish_prompt(scheduler, "b", [*B, *X, 8])  # needs all three blocks
    assert finish_prompt_hits(scheduler, [*A, 6]) == 0
    assert finish_prompt_hits(scheduler, [*B, 6]) == 2


def test_digest_names_the_whole_prefix() -> None:
    assert block_digest(b"", X) == block_digest(b"", tuple(X))
    assert block_digest(block_digest(b"", A), X) != block_digest(block_digest(b"", B), X)
    assert block_digest(b"", [1, 23]) != block_digest(b"", [12, 3])


def test_all_digests_equal_never_hand_out_wrong_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache_module, "block_digest", lambda parent, tokens: b"same")
    scheduler = make_scheduler(block_size=2)
    (first, *_) = finish_prompt(scheduler, "a", [*A, *X, 5])
    cache = scheduler.prefix_cache
    assert cache.match(make_request("b", [*B, *X, 5])) == []
    assert cache.match(make_request("c", [*X, *X, 5])) == []
    assert cache.match(make_request("d", [*A, *A, 5])) == [first]
    finish_prompt(scheduler, "e", [*B, *X, 5])
    assert cache.match(make_request("f", [*A, *X, 5])) in ([], [first])


def test_a_collision_of_parents_never_hands_out_wrong_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A and B collide; X after B must not serve as X after A."""
    monkeypatch.setattr(
        prefix_cache_module, "block_digest", lambda parent, tokens: parent + b"deeper"
    )
    scheduler = make_scheduler(block_size=2)
    finish_prompt(scheduler, "a", [*A, 9])
    after_b = finish_prompt(scheduler, "b", [*B, *X, 9])
    found = scheduler.prefix_cache.match(make_request("c", [*A, *X, 5]))
    assert after_b[1] not in found


# ---- blocks that hold for one following token only ----


def ahead_scheduler(**options: Any) -> Scheduler:
    """With an EAGLE drafter, whose KV of a token depends on the next one."""
    return make_scheduler(**{"block_size": 4, "num_drafts": 2, "drafter_has_kv": True, **options})


def hits(scheduler: Scheduler, prompt: Sequence[int]) -> list[int]:
    """Blocks that the cache would spare, without running the prompt."""
    return scheduler.prefix_cache.match(make_request("probe", prompt))


def test_only_a_drafter_with_kv_looks_ahead() -> None:
    assert ahead_scheduler().prefix_cache.num_ahead == 1
    assert ahead_scheduler(drafter_has_kv=False).prefix_cache.num_ahead == 0
    assert make_scheduler().prefix_cache.num_ahead == 0


def test_a_prompt_that_goes_on_the_same_finds_every_block() -> None:
    scheduler = ahead_scheduler()
    blocks = finish_prompt(scheduler, "a", list(range(10)))
    assert hits(scheduler, [*range(8), 8, 99]) == blocks[:2]
    assert len(scheduler.prefix_cache) == 2


def test_a_block_is_found_only_with_the_same_following_token() -> None:
    scheduler = ahead_scheduler()
    blocks = finish_prompt(scheduler, "a", list(range(10)))
    assert hits(scheduler, [*range(8), 99, 98]) == blocks[:1]
    assert hits(scheduler, [*range(4), 99, 98]) == []
    assert hits(scheduler, [*range(4), 4]) == blocks[:1]
    plain = ahead_scheduler(drafter_has_kv=False)
    blocks = finish_prompt(plain, "a", list(range(10)))
    assert hits(plain, [*range(8), 99, 98]) == blocks[:2]  # nothing there depends on it


def test_divergence_behind_a_boundary_recomputes_that_block_alone() -> None:
    scheduler = ahead_scheduler()
    first = finish_prompt(scheduler, "a", list(range(10)))
    scheduler.add(make_request("b", [*range(8), 99, 98], max_tokens=1))
    plan = step(scheduler, token=9)
    assert rows_of(plan) == {"b": (4, 6)}
    second = plan.block_appends[0].block_ids
    assert second[0] == first[0] and second[1] not in first[:2]


def test_both_versions_of_a_block_live_side_by_side() -> None:
    scheduler = ahead_scheduler()
    first = finish_prompt(scheduler, "a", list(range(10)))
    second = finish_prompt(scheduler, "b", [*range(8), 99, 98])
    assert len(scheduler.prefix_cache) == 3
    assert hits(scheduler, [*range(8), 8, 1, 1]) == first[:2]
    assert hits(scheduler, [*range(8), 99, 1, 1]) == second[:2]
    assert hits(scheduler, [*range(8), 50, 1, 1]) == first[:1]


def test_versions_of_a_block_have_tails_of_their_own() -> None:
    """What follows one version is not found behind the other, though its own tokens are equal."""
    scheduler = ahead_scheduler(block_size=2)
    first = finish_prompt(scheduler, "a", [*A, 5, *X, *X])
    second = finish_prompt(scheduler, "b", [*A, 6, *X, *X])
    assert first[0] != second[0]
    assert hits(scheduler, [*A, 5, *X, *X]) == first[:3]
    assert hits(scheduler, [*A, 6, *X, *X]) == second[:3]
    assert not set(first[:3]) & set(second[:3])


def test_divergence_inside_a_block_loses_nothing() -> None:
    plain = ahead_scheduler(drafter_has_kv=False)
    ahead = ahead_scheduler()
    prompt, other = list(range(10)), [0, 1, 2, 3, 4, 5, 99, 7, 8, 9]
    for scheduler in (plain, ahead):
        first = finish_prompt(scheduler, "a", prompt)
        assert hits(scheduler, other) == first[:1]
        scheduler.add(make_request("b", other))
        assert rows_of(scheduler.schedule()) == {"b": (4, 6)}


def test_a_known_prompt_still_computes_its_last_block_or_token() -> None:
    scheduler = ahead_scheduler()
    blocks = finish_prompt(scheduler, "a", list(range(8)))
    assert len(scheduler.prefix_cache) == 2  # the token sampled behind the last block is known
    assert hits(scheduler, list(range(8))) == blocks[:1]  # its own next token is not
    assert hits(scheduler, [*range(8), 9]) == blocks[:2]  # 9 was sampled
    assert hits(scheduler, [*range(8), 8]) == blocks[:1]


def test_a_block_is_not_offered_before_its_following_token_is_known() -> None:
    scheduler = ahead_scheduler(block_size=2)
    scheduler.add(make_request("a", [1, 2, 3, 4], max_tokens=20, num_drafts=2))
    plan = scheduler.schedule()
    assert len(scheduler.prefix_cache) == 0
    scheduler.update(result_of(plan, 5))
    assert len(scheduler.prefix_cache) == 2  # (3, 4) goes on with 5
    plan = scheduler.schedule()
    row = plan.rows[0]
    scheduler.update(StepResult(plan.index, [RowResult("a", row.epoch, [6], num_drafts=2)]))
    assert len(scheduler.prefix_cache) == 2  # (5, 6): 6 is not computed
    plan = scheduler.schedule()
    scheduler.update(StepResult(plan.index, [RowResult("a", row.epoch, [7, 8, 9], num_drafts=2)]))
    # (5, 6) goes on with 7 and (7, 8) with 9.
    assert len(scheduler.prefix_cache) == 4
    blocks = scheduler.running[0].block_ids
    assert hits(scheduler, [*range(1, 10), 0]) == blocks[:4]


def test_chunks_of_a_prompt_know_what_follows_them() -> None:
    scheduler = ahead_scheduler(max_num_seqs=1, max_num_batched_tokens=4)
    scheduler.add(make_request("a", range(10)))
    step(scheduler)
    assert len(scheduler.prefix_cache) == 1
    assert len(hits(scheduler, [*range(5)])) == 1
    assert len(hits(scheduler, [*range(4), 99])) == 0


def test_an_evicted_version_leaves_the_other() -> None:
    scheduler = ahead_scheduler(block_size=2, num_blocks=7, max_model_len=12)
    finish_prompt(scheduler, "a", [*A, 8])
    kept = finish_prompt(scheduler, "b", [*A, 9])
    assert finish_prompt_hits(scheduler, [*A, 8]) == finish_prompt_hits(scheduler, [*A, 9]) == 2
    finish_prompt(scheduler, "long", [5, 5, 6, 6, 7, 7, 4, 4])  # takes five of six
    assert finish_prompt_hits(scheduler, [*A, 8]) == 0
    assert hits(scheduler, [*A, 9]) == kept[:1]
    assert len(scheduler.prefix_cache) == 5  # the other, and the four of the long one


def test_equal_digests_never_hand_out_the_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        prefix_cache_module, "block_digest", lambda parent, tokens: parent + b"deeper"
    )
    scheduler = ahead_scheduler(block_size=2)
    first = finish_prompt(scheduler, "a", [*A, 8, 8])
    assert hits(scheduler, [*A, 8, 5]) == first[:1]
    assert hits(scheduler, [*A, 9, 5]) == []


def test_same_text_computed_twice_keeps_the_first() -> None:
    scheduler = ahead_scheduler(block_size=2)
    scheduler.add(make_request("a", [*A, *X, 5], max_tokens=1))
    scheduler.add(make_request("b", [*A, *X, 5], max_tokens=1))
    plan = step(scheduler, token=9)
    first = next(a for a in plan.block_appends if a.slot == plan.admissions[0].slot)
    assert not scheduler.has_work and len(scheduler.prefix_cache) == 2
    assert hits(scheduler, [*A, *X, 5]) == first.block_ids[:2]
    scheduler.pool.check()


# ---- blocks that lack the drafter's KV ----


def drafting_scheduler(num_drafts: int, **options: Any) -> Scheduler:
    """num_drafts: that steps make for now, of at most 2"""
    scheduler = make_scheduler(block_size=2, num_drafts=2, drafter_has_kv=True, **options)
    return with_drafts(scheduler, num_drafts)


def with_drafts(scheduler: Scheduler, num_drafts: int) -> Scheduler:
    scheduler.num_places = scheduler.num_drafts = num_drafts
    return scheduler


def answer(scheduler: Scheduler, name: str, prompt: list[int], num_tokens: int = 6) -> list[int]:
    """Serve a request alone; returns its prompt and its answer."""
    request = make_request(name, prompt, max_tokens=num_tokens, num_drafts=2)
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler, token=9)
    return request.token_ids


def test_without_drafts_an_answer_is_found_by_the_next_turn() -> None:
    scheduler = drafting_scheduler(0)
    text = answer(scheduler, "a", [1, 2, 3])
    later = make_request("b", [*text, 7], num_drafts=2)
    scheduler.add(later)
    plan = scheduler.schedule()
    assert rows_of(plan) == {"b": (8, 2)} and later.num_drafter_kv == 2, "the prompt has KV of it"
    assert plan.no_drafts == [later.slot], "the device knows"


def test_with_drafts_blocks_without_the_drafters_kv_are_computed_again() -> None:
    scheduler = drafting_scheduler(0)
    text = answer(scheduler, "a", [1, 2, 3])
    with_drafts(scheduler, 2)
    later = make_request("b", [*text, 7], num_drafts=2)
    wants_none = make_request("c", [*text, 7], num_drafts=0)
    for request in (later, wants_none):
        scheduler.add(request)
    plan = scheduler.schedule()
    assert rows_of(plan) == {"b": (2, 8), "c": (8, 2)}
    assert later.num_drafter_kv is None and plan.no_drafts == [wants_none.slot]


def test_a_block_with_the_drafters_kv_takes_the_place_of_one_without() -> None:
    scheduler = drafting_scheduler(0)
    text = answer(scheduler, "a", [1, 2, 3])
    held, num_free = len(scheduler.prefix_cache), scheduler.pool.num_free
    with_drafts(scheduler, 2)
    answer(scheduler, "b", text, num_tokens=1)
    assert len(scheduler.prefix_cache) == held and scheduler.pool.num_free == num_free
    request = make_request("c", [*text, 7], num_drafts=2)
    scheduler.add(request)
    assert rows_of(scheduler.schedule()) == {"c": (8, 2)}
    assert request.num_drafter_kv is None
    scheduler.abort("c")
    with_drafts(scheduler, 0)
    answer(scheduler, "d", text, num_tokens=1)  # keeps the one that is there
    assert scheduler.prefix_cache.num_drafter_kv(scheduler.prefix_cache.match(request)) is None
    scheduler.pool.check()


def test_tokens_computed_again_for_drafts_find_no_block_without_them() -> None:
    scheduler = drafting_scheduler(0)
    text = answer(scheduler, "a", [1, 2, 3])
    request = make_request("b", [*text, 7], max_tokens=9, num_drafts=2)
    scheduler.add(request)
    for _ in range(3):
        step(scheduler, token=9)
    assert request.num_drafter_kv == 2 and scheduler.undrafted == [request]
    with_drafts(scheduler, 2).redraft = True
    plan = scheduler.schedule()
    assert plan.admissions[0].num_computed == 2 and request.num_drafter_kv is None
    assert plan.no_drafts == []


def test_a_forgotten_block_may_hold_anything_again() -> None:
    scheduler = drafting_scheduler(0, num_blocks=8)
    answer(scheduler, "a", [1, 2, 3])
    with_drafts(scheduler, 2)
    for number in range(3):
        text = answer(scheduler, f"{number}", [20 + number, 5, 6])
    request = make_request("b", [*text, 7], num_drafts=2)
    assert len(scheduler.prefix_cache.match(request, for_drafts=True)) == 4
    assert not scheduler.prefix_cache._undrafted
