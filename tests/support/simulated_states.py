"""Recurrent state for the simulated worker: which text each slot and each snapshot has seen.

A slot keeps the text of its checkpoint, a log and a counter, as `stoop.ops.recurrent` says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stoop.core.step import PlannedRow, StateCopies, StepPlan


@dataclass(frozen=True)
class SlotText:
    checkpoint: tuple[int, ...] = ()
    log: tuple[int, ...] = ()
    pending: int = 0  # tokens of the log that count

    @property
    def text(self) -> tuple[int, ...]:
        return self.checkpoint + self.log[: self.pending]


class SlotStates:
    """computed: the tokens that a slot has computed, by its own counters"""

    def __init__(
        self, num_slots: int, query_len: int, computed: Callable[[int], Sequence[int]]
    ) -> None:
        self.slots = [SlotText()] * num_slots
        self.query_len, self.computed = query_len, computed
        self.snapshots: dict[int, SlotText] = {}

    def save_ended(self, copies: StateCopies | None) -> None:
        """Before slots are written."""
        ended = copies.ended if copies else []
        assert len({copy.snapshot for copy in ended}) == len(ended), "a snapshot of two states"
        for copy in ended:
            state = self.slots[copy.slot]
            assert 0 <= copy.pending <= state.pending, "a rejected draft is saved"
            self.snapshots[copy.snapshot] = replace(state, pending=copy.pending)

    def restore(self, plan: StepPlan) -> None:
        """After slots are admitted: exactly the requests with a cached prefix get its state."""
        restores = plan.copies.restores if plan.copies else []
        assert len({copy.slot for copy in restores}) == len(restores), "a slot of two states"
        cached = {each.slot for each in plan.admissions if each.num_computed}
        assert cached == {copy.slot for copy in restores}, "a cached prefix without its state"
        for copy in restores:
            state = self.snapshots[copy.snapshot]
            assert state.text == tuple(self.computed(copy.slot)), "a snapshot of another text"
            self.slots[copy.slot] = state

    def run(self, row: PlannedRow, context: int, text: Sequence[int]) -> None:
        """Fold what counts, then log the row's tokens or take them in.

        text: with the tokens of the row, drafts included
        """
        seen = self.slots[row.slot].text if context else ()
        assert seen == tuple(text[:context]), f"{row.request_id} goes on from another text's state"
        if row.num_tokens <= self.query_len:
            self.slots[row.slot] = SlotText(seen, tuple(text[context:]))
        else:
            self.slots[row.slot] = SlotText(tuple(text))

    def commit(self, slot: int, context: int) -> None:
        """Of the logged tokens, those that are computed for good count."""
        state = self.slots[slot]
        pending = len(self.computed(slot)) - context if state.log else 0
        self.slots[slot] = replace(state, pending=pending)

    def save(self, copies: StateCopies | None) -> None:
        """After the phases."""
        saves = copies.saves if copies else []
        assert len({copy.snapshot for copy in saves}) == len(saves), "a snapshot of two states"
        for copy in saves:
            self.snapshots[copy.snapshot] = self.slots[copy.slot]
