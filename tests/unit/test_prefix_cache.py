"""Which blocks a prompt may take over from others, and which it must not."""

import pytest
from helpers import make_request, make_scheduler, result_of, rows_of, step

from stoop.core.sampling_params import SamplingParams
from stoop.scheduler import prefix_cache as prefix_cache_module
from stoop.scheduler.prefix_cache import block_digest
from stoop.scheduler.scheduler import Scheduler

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
