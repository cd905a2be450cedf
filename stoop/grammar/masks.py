"""The masks of a step: one row of bits per position that a grammar constrains, filled by the host.

The host fills them while the device runs the forward pass. Drafts of the step before have come to
the host by then; results of the steps before have been read, since a core launches no step after
one with a grammar before it has read that one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.core.step import Admission, PlannedRow, RowResult
from stoop.grammar.compiler import GrammarStore
from stoop.grammar.filling import MaskFiller, Path
from stoop.grammar.follower import FREE, Follower
from stoop.ops.inputs import SlotTensors
from stoop.ops.sampling import MaskTensors

DEAD_END = (
    "no token fits both the grammar of structured_outputs and the request's other options: relax "
    "bad_words, stop_token_ids or the grammar"
)


@dataclass(frozen=True)
class _HostDrafts:
    """The drafts of all slots, on the host."""

    token_ids: Tensor  # [slots + 1, K] int32
    counts: Tensor  # [slots + 1] int64
    landed: torch.cuda.Event | None  # recorded after the copies; None on a CPU


class GrammarMasks:
    """Followers by slot, and the buffers that phase V reads.

    device: what the phase reads; slots: state of requests, where drafts are
    """

    def __init__(
        self, store: GrammarStore, device: MaskTensors, slots: SlotTensors, num_drafts: int
    ) -> None:
        self.store = store
        self.num_drafts = num_drafts
        self._device = device
        self._slots = slots
        self._followers: dict[int, Follower] = {}
        self._filler = MaskFiller()
        self._host: MaskTensors | None = None  # made for the first grammar
        self._drafts: _HostDrafts | None = None

    def admit(self, admission: Admission) -> None:
        """A request enters a slot, with the tokens that it has after a preemption."""
        asked = admission.rules.params.structured_outputs
        if asked is None:
            self._followers.pop(admission.slot, None)
            return
        output_ids = admission.token_ids[admission.num_prompt_tokens :]
        self._followers[admission.slot] = self.store.get(asked).follow(
            admission.rules.stop_ids, asked.after, output_ids
        )

    # ---- before phase V ----

    def fill(self, batch: InputBatch) -> None:
        """Write the masks of a step. Followers are afterwards where they were before."""
        host = self._host_masks()
        drafts = self._read_drafts(batch.plan_rows)
        places = host.rows.numpy()  # the same memory
        places.fill(FREE)
        masked: list[int] = []  # rows of the batch
        paths: list[Path] = []
        for place, row in enumerate(batch.plan_rows):
            follower = self._followers.get(row.slot)
            if follower is not None and not follower.ended and row.samples:
                masked.append(place)
                paths.append((follower, drafts.get(row.slot, ())))
        every, count = self._filler.fill(paths, host.bits)
        for place, rows in zip(masked, every, strict=True):
            places[place, : len(rows)] = rows
        device = self._device
        device.rows.copy_(host.rows, non_blocking=True)
        device.bits[:count].copy_(host.bits[:count], non_blocking=True)
        # A graph may index every row, so every row is written.
        device.bits[count:].fill_(0)

    def _read_drafts(self, rows: Sequence[PlannedRow]) -> dict[int, list[int]]:
        """Drafts by slot, of the rows that have some."""
        wanted = [row.slot for row in rows if self._has_drafts(row)]
        if self._drafts is None or not wanted:
            return {}
        if self._drafts.landed is not None:
            self._drafts.landed.synchronize()
        counts = self._drafts.counts[wanted].tolist()
        tokens = self._drafts.token_ids[wanted].tolist()
        found = zip(wanted, tokens, counts, strict=True)
        return {slot: ids[:count] for slot, ids, count in found}

    def _has_drafts(self, row: PlannedRow) -> bool:
        follower = self._followers.get(row.slot)
        return follower is not None and follower.drafted

    def _host_masks(self) -> MaskTensors:
        if self._host is None:
            self._host = MaskTensors(*(_host_copy(each) for each in vars(self._device).values()))
        return self._host

    # ---- after a step ----

    def send_drafts(self, rows: Sequence[PlannedRow]) -> None:
        """Start to copy the drafts that a step with a grammar has made.

        All slots: a request that the next step leaves out keeps its drafts.
        """
        for row in rows:
            follower = self._followers.get(row.slot)
            if follower is not None and row.samples:
                follower.drafted = True
        if not self.num_drafts:
            return
        slots, drafts = self._slots, self._host_drafts()
        place = torch.arange(self.num_drafts, device=slots.token_ids.device)
        where = (slots.num_tokens[:, None] + place).clamp_(max=slots.token_ids.shape[1] - 1)
        drafts.token_ids.copy_(slots.token_ids.gather(1, where), non_blocking=True)
        drafts.counts.copy_(slots.num_drafts, non_blocking=True)
        if drafts.landed is not None:
            drafts.landed.record()

    def _host_drafts(self) -> _HostDrafts:
        if self._drafts is None:
            slots = self._slots
            shape = (slots.token_ids.shape[0], self.num_drafts)
            cuda = slots.token_ids.device.type == "cuda"
            token_ids = torch.zeros(shape, dtype=slots.token_ids.dtype, pin_memory=cuda)
            event = torch.cuda.Event() if cuda else None
            self._drafts = _HostDrafts(token_ids, _host_copy(slots.num_drafts), event)
        return self._drafts

    def advance(self, planned: Sequence[PlannedRow], results: Sequence[RowResult]) -> None:
        """Take in the tokens that a step has added. A token that the grammar forbids ends its
        request with an error: it can only come from a mask that allows nothing. So does a row
        without a token if bad words may have ruled out all that its mask allows."""
        for row, result in zip(planned, results, strict=True):
            follower = self._followers.get(row.slot)
            if follower is None:
                continue
            if result.failed and row.rules.params.bad_words:
                result.error = DEAD_END
            allowed = follower.advance(result.token_ids)
            if allowed < len(result.token_ids):
                result.token_ids = result.token_ids[:allowed]
                result.num_drafts = 0
                result.error = DEAD_END


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
