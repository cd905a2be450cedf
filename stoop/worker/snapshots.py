"""Snapshots of recurrent state on the device, and the copies between them and slots.

A slot's state is one row of bytes, and a counter that says how many tokens of its log count. A
snapshot is a copy of both, so it is exact while some tokens are in the log only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stoop.batch.staging import StagedWrites
from stoop.core.step import StateCopies, StateCopy

# Bytes of the temporary that a copy goes through.
_PART_BYTES = 32 * 2**20
_WORD = torch.int64  # rows are copied by words, which takes a fraction of the time of bytes


class SnapshotPool:
    """All snapshots.

    slots: [slots + 1, slot_bytes] uint8, the state of every slot
    pending: [slots + 1] int64, logged tokens that count
    """

    def __init__(self, slots: Tensor, pending: Tensor, num_snapshots: int) -> None:
        self.slots, self.slot_pending = slots, pending
        self.num_snapshots = num_snapshots
        device = slots.device
        self.rows = torch.empty((num_snapshots, slots.shape[1]), dtype=slots.dtype, device=device)
        self.pending = torch.zeros(num_snapshots, dtype=pending.dtype, device=device)
        # Of the step at hand: slots and snapshots of each kind of copy. A step saves from a slot
        # at most twice, after its last request ended and after its phases.
        self._ids = torch.zeros((6, slots.shape[0]), dtype=torch.int64, device=device)

    def stage(self, staged: StagedWrites, copies: StateCopies) -> None:
        """Send the ids along with the step's other edits, in the same copy to the device."""
        kinds: tuple[Sequence[StateCopy], ...] = (copies.ended, copies.restores, copies.saves)
        for kind, each in enumerate(kinds):
            staged.put(self._ids, 2 * kind, [copy.slot for copy in each])
            staged.put(self._ids, 2 * kind + 1, [copy.snapshot for copy in each])
        for ended in copies.ended:  # the slot's counter may be its next request's already
            staged.put(self.pending, ended.snapshot, ended.pending)

    # Nothing below waits for the device. All of it runs on the stream of the steps, so that steps
    # in flight come first.

    def save_ended(self, copies: StateCopies) -> None:
        """Before anything else is written to these slots, once the step's edits are applied."""
        if copies.ended:
            slots, snapshots = self._pair(0, copies.ended)
            copy_rows(self.slots, slots, self.rows, snapshots)

    def restore(self, copies: StateCopies) -> None:
        """Before the phases, once the step's edits are applied: they reset the counters."""
        if not copies.restores:
            return
        slots, snapshots = self._pair(1, copies.restores)
        copy_rows(self.rows, snapshots, self.slots, slots)
        self.slot_pending.index_copy_(0, slots, self.pending.index_select(0, snapshots))

    def save(self, copies: StateCopies) -> None:
        """After the phases."""
        if not copies.saves:
            return
        slots, snapshots = self._pair(2, copies.saves)
        copy_rows(self.slots, slots, self.rows, snapshots)
        self.pending.index_copy_(0, snapshots, self.slot_pending.index_select(0, slots))

    def _pair(self, kind: int, copies: Sequence[StateCopy]) -> tuple[Tensor, Tensor]:
        slots, snapshots = self._ids[2 * kind : 2 * kind + 2, : len(copies)]
        return slots, snapshots


def copy_rows(source: Tensor, origins: Tensor, target: Tensor, places: Tensor) -> None:
    """target[places] = source[origins], a part of each row at a time: the temporary stays small.

    source, target: [rows, bytes] uint8; origins, places: [count] int64
    """
    ours, theirs = source.view(_WORD), target.view(_WORD)
    num_words = ours.shape[1]
    width = max(1, _PART_BYTES // _WORD.itemsize // origins.shape[0])
    for start in range(0, num_words, width):
        part = slice(start, start + width)
        theirs[:, part].index_copy_(0, places, ours[:, part].index_select(0, origins))
