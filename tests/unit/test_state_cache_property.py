"""Random traffic of models with recurrent layers, and bugs put back that it must notice.

The worker remembers which text each slot's state has seen, and each snapshot's: a state of another
text, or of another length, is noticed when it is restored, and in every step that reads it.
"""

import dataclasses
from typing import Any

import pytest

from stoop.core.request import PrefixNode, Request
from stoop.core.step import EndedCopy, StateCopies, StepPlan
from stoop.scheduler import prefix_cache as prefix_cache_module
from stoop.scheduler.hybrid import HybridPrefixCache, HybridScheduler
from stoop.scheduler.prefix_cache import PrefixCache
from stoop.scheduler.snapshots import SnapshotIndex
from support.scheduler_simulation import (
    TIGHT,
    TIGHT_SPECULATIVE,
    BookkeepingWorker,
    recurrent_world,
    run_traffic,
)


@pytest.mark.parametrize("chunk", range(2))
def test_random_traffic_keeps_every_invariant(chunk: int) -> None:
    totals = run_traffic(range(chunk * 60, chunk * 60 + 60), recurrent_world)
    kinds = ("preemptions", "hits", "aborts", "stops", "dead", "taken", "restored")
    assert min(totals[kind] for kind in kinds) > 50, totals


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("world", [TIGHT, TIGHT_SPECULATIVE], ids=["plain", "speculative"])
def test_tight_pool(world: Any, depth: int) -> None:
    world = dataclasses.replace(world, depth=depth, num_snapshots=3)
    totals = run_traffic(range(10), world)
    assert totals["preemptions"] > 10 and totals["restored"] > 10, totals


def test_unchunked_traffic() -> None:
    changes = {"chunked": False, "max_num_batched_tokens": 24, "num_snapshots": 6}
    totals = run_traffic(range(30), dataclasses.replace(TIGHT, **changes))
    assert totals["taken"] > 10 and totals["restored"] > 0, totals


def test_colliding_digests_never_restore_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache_module, "block_digest", lambda parent, tokens: b"same")
    totals = run_traffic(range(10), dataclasses.replace(TIGHT, num_blocks=20, num_snapshots=4))
    assert totals["taken"] > 0, totals  # the traffic itself checks every text that is restored


def test_ends_of_requests_are_saved_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the bugs in them would show nothing."""
    saved: set[int] = set()
    used = []
    execute = BookkeepingWorker.execute

    def watched(self: Any, plan: StepPlan, *args: Any) -> Any:
        for copy in plan.copies.ended if plan.copies else ():
            saved.add(copy.snapshot)
        used.extend(c for c in (plan.copies or StateCopies()).restores if c.snapshot in saved)
        return execute(self, plan, *args)

    monkeypatch.setattr(BookkeepingWorker, "execute", watched)
    run_traffic(range(40), recurrent_world)
    assert len(used) > 20


# ---- bugs put back ----


def hit_blocks_alone(match: Any) -> Any:
    """A hit with blocks and no snapshot; the one that is restored is another's."""
    return PrefixCache.match


def use_any_snapshot(use: Any) -> Any:
    def mutant(self: SnapshotIndex, node: PrefixNode) -> int:
        self.num_restored += 1
        return next(iter(self._entries.values())).snapshot

    return mutant


def name_one_block_less(take: Any) -> Any:
    """A snapshot is published at a wrong length."""

    def mutant(self: SnapshotIndex, request: Request, node: PrefixNode, step: int) -> int | None:
        return take(self, request, node.parent or node, step)

    return mutant


def find_by_digest_alone(find: Any) -> Any:
    def mutant(self: SnapshotIndex, node: PrefixNode) -> int | None:
        entry = self._entries.get(node.digest)
        return entry.snapshot if entry else None

    return mutant


def save_inside_blocks(worth: Any) -> Any:
    def mutant(self: HybridScheduler, request: Request, stay: Any, length: int) -> bool:
        down = length // self.block_size * self.block_size
        return down > 0 and bool(worth(self, request, stay, down))

    return mutant


def publish_at_once(take: Any) -> Any:
    def mutant(self: SnapshotIndex, request: Request, node: PrefixNode, step: int) -> int | None:
        snapshot = take(self, request, node, step)
        self.publish(step)
        return snapshot

    return mutant


def never_pin(hold: Any) -> Any:
    def mutant(self: SnapshotIndex, node: PrefixNode) -> int | None:
        snapshot = hold(self, node)
        self.unpin()
        return snapshot

    return mutant


def save_ends_with_all_that_is_logged(finish_plan: Any) -> Any:
    """The tokens after the end of the block count, too."""

    def mutant(self: HybridScheduler, plan: Any) -> StepPlan:
        self._ended = [dataclasses.replace(c, pending=c.pending + 1) for c in self._ended]
        return finish_plan(self, plan)

    return mutant


def save_ends_late(finish_plan: Any) -> Any:
    """One plan later, when the slot may have another request."""

    def mutant(self: HybridScheduler, plan: Any) -> StepPlan:
        held: list[EndedCopy] = self.__dict__.setdefault("held", [])
        self._ended, self.held = held, self._ended  # type: ignore[attr-defined]
        return finish_plan(self, plan)

    return mutant


def save_past_the_log(save_ended: Any) -> Any:
    """Also where the checkpoint is past the end of the block."""

    def mutant(self: HybridScheduler, request: Request) -> None:
        before = self._known_before
        if before is not None and before > self._stays[request].known:
            self._known_before = max(before - 2, 1)
        save_ended(self, request)
        self._known_before = before

    return mutant


def save_aborted_requests(finish: Any) -> Any:
    """Steps in flight move the slot of a request whose end the device does not know."""

    def mutant(self: HybridScheduler, request: Request, reason: str, stop: Any = None) -> None:
        if reason == "abort" and request in self._stays:
            self._known_before = request.num_tokens
            self._save_ended(request)
            self._known_before = None
        finish(self, request, reason, stop)

    return mutant


def forget_the_restore(finish_plan: Any) -> Any:
    def mutant(self: HybridScheduler, plan: Any) -> StepPlan:
        step: StepPlan = finish_plan(self, plan)
        if step.copies is None:
            return step
        return dataclasses.replace(step, copies=dataclasses.replace(step.copies, restores=[]))

    return mutant


def cut_to_nothing(chunk_end: Any) -> Any:
    def mutant(self: HybridScheduler, request: Request, computed: int, shared: int) -> int:
        end = int(chunk_end(self, request, computed, shared))
        return end // self.block_size * self.block_size

    return mutant


MUTANTS = [
    (HybridPrefixCache, "match", hit_blocks_alone),
    (SnapshotIndex, "use", use_any_snapshot),
    (SnapshotIndex, "take", name_one_block_less),
    (SnapshotIndex, "take", publish_at_once),
    (SnapshotIndex, "hold", never_pin),
    (HybridScheduler, "_is_worth_saving", save_inside_blocks),
    (HybridScheduler, "_finish_plan", save_ends_with_all_that_is_logged),
    (HybridScheduler, "_finish_plan", save_ends_late),
    (HybridScheduler, "_finish_plan", forget_the_restore),
    (HybridScheduler, "_save_ended", save_past_the_log),
    (HybridScheduler, "finish", save_aborted_requests),
    (HybridScheduler, "_chunk_end", cut_to_nothing),
]


@pytest.mark.parametrize(
    ("owner", "name", "mutant"), MUTANTS, ids=[mutant.__name__ for *_, mutant in MUTANTS]
)
def test_traffic_notices_mutant(
    owner: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name)))
    with pytest.raises((AssertionError, IndexError)):
        run_traffic(range(120), recurrent_world)


def test_traffic_notices_digests_compared_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks are compared by their tokens, so that a snapshot of another text needs another length.
    monkeypatch.setattr(
        prefix_cache_module, "block_digest", lambda parent, tokens: bytes([tokens[0]])
    )
    mutant = find_by_digest_alone(SnapshotIndex.find)
    monkeypatch.setattr(SnapshotIndex, "find", mutant)
    with pytest.raises(AssertionError):
        run_traffic(range(60), recurrent_world)
