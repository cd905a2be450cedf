"""Which prefixes have a snapshot of the recurrent state after them.

KV blocks bring back any prefix, since each token has its own place in them. A recurrent state is
that of one length only, so a prefix of another length needs a snapshot of its own. Snapshots are
numbers here; the worker holds their bytes.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from stoop.core.request import PrefixNode, Request
from stoop.scheduler.prefix_cache import same_text


@dataclass(frozen=True)
class _Entry:
    snapshot: int
    node: PrefixNode  # of the last block before the state


@dataclass(frozen=True, eq=False)
class _Take:
    """A snapshot that a step in flight takes."""

    request: Request
    step: int
    entry: _Entry


class SnapshotIndex:
    """Snapshots by the prefix that they follow. Each is free, held, or being taken.

    The least recently used one is evicted first. One that a plan copies from or to is pinned until
    the plan is made, since its copies do not run in the order of planning.
    """

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_taken = 0  # since the start
        self.num_restored = 0
        self.reset()

    def reset(self) -> None:
        """Forget all of them."""
        self._free = list(reversed(range(self.num_snapshots)))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._taking: deque[_Take] = deque()  # in the order of steps
        self._taken: set[bytes] = set()  # digests of what is being taken
        self._pinned: set[int] = set()

    @property
    def num_held(self) -> int:
        return len(self._entries)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, node: PrefixNode) -> int | None:
        """The snapshot of exactly this prefix."""
        entry = self._entries.get(node.digest)
        return entry.snapshot if entry is not None and same_text(entry.node, node) else None

    def expects(self, node: PrefixNode) -> bool:
        """Whether the prefix has a snapshot or will have one, so that no other is needed."""
        return node.digest in self._entries or node.digest in self._taken

    def use(self, node: PrefixNode) -> int:
        """A snapshot that was found is restored."""
        snapshot = self.find(node)
        assert snapshot is not None, "a prefix without a snapshot is used"
        self._entries.move_to_end(node.digest)
        self._pinned.add(snapshot)
        self.num_restored += 1
        return snapshot

    def take(self, request: Request, node: PrefixNode, step: int) -> int | None:
        """A step saves the request's state, to be found when its result has landed.

        None if no snapshot can be had now.
        """
        snapshot = self._allocate()
        if snapshot is not None:
            self._taking.append(_Take(request, step, _Entry(snapshot, node)))
            self._taken.add(node.digest)
        return snapshot

    def publish(self, step: int) -> None:
        """The results of this step land: others may find what it saved, unless it was dropped."""
        while self._taking and self._taking[0].step <= step:
            entry = self._taking.popleft().entry
            self._taken.remove(entry.node.digest)
            self._hold(entry)

    def hold(self, node: PrefixNode) -> int | None:
        """A snapshot that the next plan takes from a slot whose request has ended.

        It can be found at once, since that plan saves before it restores.
        """
        snapshot = self._allocate()
        if snapshot is not None:
            self._pinned.add(snapshot)
            self._hold(_Entry(snapshot, node))
        return snapshot

    def drop(self, request: Request) -> None:
        """The request leaves its slot: what its steps in flight save is not kept.

        These steps write to the snapshots before any later plan does.
        """
        if not self._taking:
            return
        for take in [take for take in self._taking if take.request is request]:
            self._taking.remove(take)
            self._taken.remove(take.entry.node.digest)
            self._free.append(take.entry.snapshot)

    def withdraw(self, nodes: Iterable[PrefixNode]) -> None:
        """Let no request find the snapshots of these prefixes."""
        for node in nodes:
            entry = self._entries.pop(node.digest, None)
            if entry is not None:
                self._free.append(entry.snapshot)

    def unpin(self) -> None:
        """The plan is made."""
        self._pinned.clear()

    def check(self) -> None:
        """Assert that each snapshot is free, held or being taken, and no two of these."""
        taking = [take.entry for take in self._taking]
        found = [*self._free, *(entry.snapshot for entry in (*self._entries.values(), *taking))]
        assert sorted(found) == list(range(self.num_snapshots)), (found, self.num_snapshots)
        assert {entry.node.digest for entry in taking} == self._taken
        assert self._taken.isdisjoint(self._entries)

    def _hold(self, entry: _Entry) -> None:
        assert entry.node.digest not in self._entries
        self._entries[entry.node.digest] = entry
        self.num_taken += 1

    def _allocate(self) -> int | None:
        for place in reversed(range(len(self._free))):
            if self._free[place] not in self._pinned:  # it may have been withdrawn
                return self._free.pop(place)
        for digest, entry in self._entries.items():
            if entry.snapshot not in self._pinned:
                del self._entries[digest]
                return entry.snapshot
        return None
