"""KV blocks by number: holders, the free list's order, the null block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoop.scheduler.block_pool import NULL_BLOCK, BlockPool


def test_counts_leave_out_the_null_block() -> None:
    pool = BlockPool(5)
    assert (pool.num_usable, pool.num_free, pool.num_used) == (4, 4, 0)
    pool.allocate(3)
    assert (pool.num_usable, pool.num_free, pool.num_used) == (4, 1, 3)
    pool.check()


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_allocating_more_than_there_is_fails_and_changes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check()


def test_double_release_is_caught() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.refs(blocks[0]) == 1 and pool.num_free == 1
    pool.release(blocks)
    assert pool.refs(blocks[0]) == 0 and pool.num_free == 2


def test_sharing_a_free_block_takes_it_off_the_free_list() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    for block in blocks:
        pool.mark_cached(block)
    pool.release(blocks)
    assert pool.num_idle(blocks) == 2
    pool.share(blocks)
    assert pool.num_idle(blocks) == 0 and pool.num_free == 1
    assert pool.allocate(1)[0] not in blocks


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain = pool.allocate(2)
    pool.mark_cached(cached)
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]
    assert pool.allocate(2)[-1] == cached


def test_least_recently_released_cached_block_is_evicted_first() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.mark_cached(block)
    for block in (b, a, c):
        pool.release([block])
    evicted: list[int] = []
    pool.on_evict = evicted.append
    pool.allocate(3)
    assert evicted == [b, a, c]


def test_use_makes_a_cached_block_recent_again() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.mark_cached(block)
        pool.release([block])
    pool.share([a])
    pool.release([a])
    evicted: list[int] = []
    pool.on_evict = evicted.append
    pool.allocate(3)
    assert evicted == [b, c, a]


def test_a_chain_loses_its_tail_before_its_head() -> None:
    pool = BlockPool(4)
    chain = pool.allocate(3)
    for block in chain:
        pool.mark_cached(block)
    pool.release(chain)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    pool.allocate(3)
    assert evicted == chain[::-1]


def test_eviction_is_told_once_and_the_mark_is_gone() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.mark_cached(blocks[0])
    pool.release(blocks)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    for _ in range(3):
        pool.release(pool.allocate(1))
    assert evicted == blocks


def test_only_held_blocks_can_be_marked() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.mark_cached(1)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=60))
def test_books_balance_under_any_sequence(events: list[tuple[int, int]]) -> None:
    """A plain model beside it: who holds what."""
    pool = BlockPool(8)
    holders: list[list[int]] = []
    for kind, number in events:
        if kind == 0 and number <= pool.num_free:
            holders.append(pool.allocate(number))
        elif kind == 1 and holders:
            pool.release(holders.pop(number % len(holders)))
        elif kind == 2 and holders:
            shared = list(holders[number % len(holders)])
            pool.share(shared)
            holders.append(shared)
        elif kind == 3 and holders:
            for block in holders[number % len(holders)]:
                pool.mark_cached(block)
        held = [block for blocks in holders for block in blocks]
        assert NULL_BLOCK not in held
        assert all(pool.refs(b) == held.count(b) for b in range(8))
        assert pool.num_free == 7 - len(set(held))
        pool.check()
