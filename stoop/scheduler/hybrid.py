"""The scheduler of models with recurrent layers: its prefix cache needs snapshots of their state.

A request may skip a prefix only if its KV blocks are cached and there is a snapshot of exactly that
length. Snapshots are taken at ends of blocks:

- at the last one before the end of a prompt, by ending a chunk there, and at the end of the blocks
  that a prompt shares with an earlier one, if there is no snapshot there;
- where a chunk ends in any case, some way after the last snapshot;
- when a request ends, if its last step logged the tokens up to or from the end of a block. Its slot
  still has the state: for the device the request has ended too, so that no step in flight moves it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from stoop.config.schema import CacheConfig
from stoop.core.messages import Delta
from stoop.core.request import Request, RequestStatus
from stoop.core.step import EndedCopy, StateCopies, StateCopy, StepPlan, StepResult
from stoop.scheduler.plan import PlanBuilder
from stoop.scheduler.prefix_cache import PrefixCache
from stoop.scheduler.scheduler import Scheduler
from stoop.scheduler.snapshots import SnapshotIndex

INTERVAL = 1024  # tokens between snapshots of one prompt where chunks happen to end
SHARED = 128  # shared tokens without a snapshot that are worth one


class HybridPrefixCache(PrefixCache):
    """Finds a prefix only where blocks and a snapshot end together."""

    snapshots: SnapshotIndex
    num_matched = 0  # blocks that the last search found, with or without a snapshot

    def match(self, request: Request, for_drafts: bool = False) -> list[int]:
        blocks = super().match(request, for_drafts)
        self.num_matched = len(blocks)
        if self.snapshots.num_held:
            for count in range(len(blocks), 0, -1):
                if self.snapshots.find(request.prefix_nodes[count - 1]) is not None:
                    return blocks[:count]
        return []

    def withdraw(self, request: Request) -> None:
        super().withdraw(request)
        count = (request.num_tokens - self.num_ahead) // self.block_size
        self.snapshots.withdraw([self.node(request, index) for index in range(count)])


@dataclass(slots=True)
class _Stay:
    """One stay of a request in a slot."""

    known: int  # tokens at its admission: all that its chunks compute
    shared: int  # where the blocks that it shares with others end, if that is worth a snapshot
    saved: int  # where its last snapshot is, or the one that it began with
    restored: int | None = None  # that one


class HybridScheduler(Scheduler):
    """Adds to a plan which states are copied to snapshots, and back."""

    def __init__(self, *args: Any, interval: int = INTERVAL, shared: int = SHARED) -> None:
        super().__init__(*args)
        self._interval, self._least_shared = interval, shared
        self._stays: dict[Request, _Stay] = {}
        self._ended: list[EndedCopy] = []  # for the next plan
        self._known_before: int | None = None  # tokens of the request at hand before its result

    def _make_prefix_cache(self, cache: CacheConfig) -> HybridPrefixCache:
        enabled, looks_ahead = cache.enable_prefix_caching, self.config.drafter_has_kv
        made = HybridPrefixCache(self.pool, cache.block_size, enabled, looks_ahead=looks_ahead)
        made.snapshots = self.snapshots
        return made

    # ---- requests come and go ----

    def _admit(self, request: Request, cached: list[int]) -> None:
        super()._admit(request, cached)
        shared = self._shared_end(request.num_computed)
        stay = self._stays[request] = _Stay(request.num_tokens, shared, request.num_computed)
        if cached:
            node = self.prefix_cache.node(request, len(cached) - 1)
            stay.restored = self.snapshots.use(node)

    def _vacate(self, request: Request) -> None:
        super()._vacate(request)
        self.snapshots.drop(request)
        self._stays.pop(request, None)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        # The device knows of these ends, too.
        if reason in ("stop", "length") and request.status is RequestStatus.RUNNING:
            self._save_ended(request)
        super().finish(request, reason, stop_reason)

    def restart(self, request_ids: Iterable[str]) -> None:
        super().restart(request_ids)
        self.snapshots.reset()
        self._stays.clear()
        self._ended = []
        self._known_before = None

    def check_idle(self) -> None:
        super().check_idle()
        assert not self._stays, len(self._stays)
        index = self.snapshots
        assert index.num_free + index.num_held == index.num_snapshots, (
            index.num_free,
            index.num_held,
        )

    # ---- chunks ----

    def _first_chunk(self, request: Request, num_cached: int) -> int:
        shared = self._shared_end(num_cached)
        return self._chunk_end(request, num_cached, shared) - num_cached

    def _order_running(self) -> list[tuple[Request, int]]:
        todo = super()._order_running()
        for place in reversed(range(len(todo))):
            request, wanted = todo[place]
            stay, computed = self._stays[request], request.num_computed
            if computed + 1 >= stay.known:
                break  # decodes, and those with one token to compute, come first
            end = self._chunk_end(request, computed, stay.shared)
            todo[place] = request, min(wanted, end - computed)
        return todo

    def _chunk_end(self, request: Request, computed: int, shared: int) -> int:
        """Where a chunk after the computed tokens ends, if the budget allows."""
        if self.config.enable_chunked_prefill:
            for end in (shared, self._last_boundary(request.num_tokens)):
                if computed < end and not self._expects(request, end):
                    return end
        return request.num_tokens

    def _shared_end(self, num_cached: int) -> int:
        """Where the blocks that the last search found end, if it should have found a snapshot."""
        assert isinstance(self.prefix_cache, HybridPrefixCache)
        end = self.prefix_cache.num_matched * self.block_size
        return end if end - num_cached >= self._least_shared else 0

    def _last_boundary(self, num_tokens: int) -> int:
        """The last end of a block that leaves a token to compute."""
        return (num_tokens - 1) // self.block_size * self.block_size

    def _expects(self, request: Request, length: int) -> bool:
        node = self.prefix_cache.node(request, length // self.block_size - 1)
        return self.snapshots.expects(node)

    # ---- copies ----

    def _finish_plan(self, plan: PlanBuilder) -> StepPlan:
        step = super()._finish_plan(plan)
        restores = [
            StateCopy(request.slot, restored)
            for request in plan.admitted
            if (restored := self._stays[request].restored) is not None
        ]
        saves = self._plan_saves(step)
        ended, self._ended = self._ended, []
        self.snapshots.unpin()
        if not (ended or restores or saves):
            return step
        return replace(step, copies=StateCopies(ended, restores, saves))

    def _plan_saves(self, step: StepPlan) -> list[StateCopy]:
        """Of the rows that are chunks: how many tokens they compute is known now."""
        saves = []
        for row in reversed(step.rows):
            if row.decodes:
                break  # decodes come first
            request = self._requests[row.request_id]
            length, stay = row.num_computed + row.num_tokens, self._stays[request]
            if not self._is_worth_saving(request, stay, length):
                continue
            node = self.prefix_cache.node(request, length // self.block_size - 1)
            snapshot = self.snapshots.take(request, node, step.index)
            if snapshot is not None:
                stay.saved = length
                saves.append(StateCopy(row.slot, snapshot))
        return saves

    def _is_worth_saving(self, request: Request, stay: _Stay, length: int) -> bool:
        """length: of the text that a row computes up to; exact if it is a chunk's"""
        last_known = min(stay.known, request.num_tokens - self.prefix_cache.num_ahead)
        if length % self.block_size or length > last_known:
            return False
        planned = length in (stay.shared, self._last_boundary(stay.known))
        far = length - stay.saved >= self._interval
        return (planned or far) and not self._expects(request, length)

    def _save_ended(self, request: Request) -> None:
        """Save the state at the last end of a block, if the last step's log reaches it.

        Before that step the slot's checkpoint was after all known tokens but the newest.
        """
        stay, before = self._stays[request], self._known_before
        # A step that ends a prompt may have been a long chunk, which logs nothing.
        if before is None or before <= stay.known:
            return
        checkpoint, length = before - 1, self._last_boundary(request.num_tokens)
        if length < checkpoint or self._expects(request, length):
            return
        node = self.prefix_cache.node(request, length // self.block_size - 1)
        snapshot = self.snapshots.hold(node)
        if snapshot is not None:
            self._ended.append(EndedCopy(request.slot, snapshot, pending=length - checkpoint))

    # ---- results ----

    def update(self, result: StepResult) -> list[Delta]:
        # What requests saved that have left their slots since was dropped. A failed one withdraws.
        self.snapshots.publish(result.index)
        return super().update(result)

    def _take_last_tokens(self, request: Request, new_ids: list[int]) -> list[int]:
        self._known_before = request.num_tokens
        taken = super()._take_last_tokens(request, new_ids)
        self._known_before = None
        return taken
