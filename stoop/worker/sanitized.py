"""A step under the sanitizer: stale reads refused, replays compared with their eager twin."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stoop.core.state import NULL_BLOCK
from stoop.core.step import StepPlan
from stoop.graph.buffers import Buffer, Extent, Lifetime
from stoop.graph.descriptor import RunMode
from stoop.graph.phases import undeclared
from stoop.graph.sanitizer import (
    BadPadding,
    MovedBuffer,
    ReplayMismatch,
    Sanitizer,
    SanitizerError,
    UndeclaredRead,
    UnwrittenRead,
)
from stoop.ops.kv_store import as_bytes
from stoop.worker.executor import PhaseExecutor, Step
from stoop.worker.new_blocks import fill_blocks
from stoop.worker.target import Target

INPUTS = "inputs, eager"
# A block id that no cache has: to read with it is an error, not a wrong answer.
POISON_BLOCK = 2**30

DRAFTED = ("draft features",)  # by row: what the next draft is made from

Snapshot = dict[str, Tensor]


class StepSanitizer:
    """declare: lists every persistent buffer, as it is now"""

    def __init__(
        self, target: Target, executor: PhaseExecutor, declare: Callable[[], list[Buffer]]
    ) -> None:
        self.target = target
        self.executor = executor
        self.declare = declare
        declared = declare()
        self.addresses = {b.name: b.tensor.data_ptr() for b in declared}
        assert len(self.addresses) == len(declared), "two buffers of one name"
        self.buffers = [b for b in declared if b.lifetime is not Lifetime.CONSTANT]
        self.caches = [b for b in self.buffers if b.extent is Extent.BLOCKS]
        self.sanitizer = Sanitizer(self.buffers)
        self._reads = {phase.name: phase.reads for phase in executor.phases}
        target.buffers.load_rows([])
        self.sanitizer.learn(INPUTS, target.inputs)

    def learn(self, key: Any, function: Callable[[], object]) -> None:
        """Also refuse a graph that relies on what none of its phases says it reads.

        key: the name of a segment and a descriptor
        """
        relied = self.sanitizer.learn(key, function)
        segment, descriptor = key
        declared = [reads for name, reads in self._reads.items() if name in segment]
        unknown = undeclared(relied, set().union(*declared))
        if unknown:
            raise UndeclaredRead(f"{segment}, {descriptor}", unknown[0])

    def check_reads(self, key: Any, reader: str) -> None:
        self.sanitizer.check_reads(key, reader)

    def begin_draft_decode(self) -> None:
        self.sanitizer.begin_draft_decode()

    def begin_step(self, plan: StepPlan) -> None:
        """Before any phase, and before new blocks are zeroed and states restored."""
        for buffer in self.declare():
            if buffer.tensor.data_ptr() != self.addresses[buffer.name]:
                raise MovedBuffer(buffer.name)
        self.sanitizer.begin_step()
        self.target.buffers.forget_rows()
        self._poison_new_slots(plan)
        self._poison_new_blocks(plan)

    def run(self, step: Step) -> None:
        """Replay, then the same phases eagerly from the same state; both must agree to the bit."""
        reader = str(step.descriptor)
        self._poison_block_tables(step)
        if step.descriptor.mode is not RunMode.STEP:
            self.sanitizer.check_reads(INPUTS, INPUTS)
        blocks = self._blocks(step)
        before = self._snapshot(blocks)
        self.executor.run(step)
        replayed = self._snapshot(blocks)
        self._restore(before, blocks)
        fresh = self.target.model_state.prepare_attn(step.batch)
        self.executor.run_twin(replace(step, metadata=fresh))
        eager = self._snapshot(blocks)
        self._check_padding(reader, step)
        self._compare(reader, step, replayed, eager)
        self._check_unwritten(reader, step, replayed)
        self._check_null_block(reader, before, replayed)

    def _poison_block_tables(self, step: Step) -> None:
        """What a slot's former holder left after its last block must not be read."""
        table = self.target.state.tensors.block_table
        for row in step.batch.plan_rows:
            table[row.slot, -(-row.num_reserved // self.target.block_size) :] = POISON_BLOCK

    def _poison_new_slots(self, plan: StepPlan) -> None:
        """A request starts from nothing, or from a snapshot that is restored after this."""
        new = [admission.slot for admission in plan.admissions]
        for buffer in self.target.model_state.state_buffers():
            if buffer.extent is Extent.SLOTS and buffer.tensor.is_floating_point() and new:
                buffer.tensor[torch.tensor(new, device=buffer.tensor.device)] = float("nan")

    def _poison_new_blocks(self, plan: StepPlan) -> None:
        """What a block's former holder left must not be read. Blocks that must be zeros are zeroed
        after this. All blocks that the plan hands out, less cached prefixes, count as new: which of
        them the plan says to zero is what this checks."""
        cached = {each.slot: each.num_computed for each in plan.admissions}
        new = [
            block
            for append in plan.block_appends
            for block in append.block_ids[cached.get(append.slot, 0) // self.target.block_size :]
        ]
        if new:
            blocks = torch.tensor(new, device=self.target.state.tensors.block_table.device)
            fill_blocks([buffer.tensor for buffer in self.caches], blocks, float("nan"))

    def _blocks(self, step: Step) -> Tensor:
        """The null block, then every block that a row of the batch may touch."""
        table, found = self.target.state.tensors.block_table, [NULL_BLOCK]
        for row in step.batch.plan_rows:
            found += table[row.slot, : -(-row.num_reserved // self.target.block_size)].tolist()
        return torch.tensor(sorted(set(found)), device=table.device)

    def _snapshot(self, blocks: Tensor) -> Snapshot:
        """All buffers, of KV caches only the blocks."""
        return {
            b.name: as_bytes(b.tensor).index_select(1, blocks)
            if b.extent is Extent.BLOCKS
            else b.tensor.clone()
            for b in self.buffers
        }

    def _restore(self, snapshot: Snapshot, blocks: Tensor) -> None:
        for buffer in self.buffers:
            saved = snapshot[buffer.name]
            if buffer.extent is Extent.BLOCKS:
                as_bytes(buffer.tensor).index_copy_(1, blocks, saved)
            else:
                buffer.tensor.copy_(saved)

    def _compare(self, reader: str, step: Step, replayed: Snapshot, eager: Snapshot) -> None:
        """Live parts only: what is in padding and in the sink means nothing."""
        batch = step.batch
        for buffer in self.buffers:
            live = buffer.live(batch.num_reqs, batch.num_tokens)
            if live is None:
                continue
            ours, theirs = (buffer.entries(each[buffer.name])[live] for each in (replayed, eager))
            if not _same_bits(ours, theirs):
                raise ReplayMismatch(reader, buffer.name, self.sanitizer.step)

    def _check_unwritten(self, reader: str, step: Step, after: Snapshot) -> None:
        """New slots and blocks were NaN: it is in the results of what reads too much."""
        batch = step.batch
        for buffer in self.buffers:
            of_batch = buffer.extent in (Extent.TOKENS, Extent.REQS)
            if of_batch and buffer.tensor.is_floating_point():
                live = buffer.live(batch.num_reqs, batch.num_tokens)
                found = buffer.entries(after[buffer.name])[live]
                if buffer.name in DRAFTED:
                    found = found[self._drafted_rows(step)]
                if bool(found.isnan().any()):
                    raise UnwrittenRead(reader, buffer.name, self.sanitizer.step)

    def _drafted_rows(self, step: Step) -> Tensor:
        """[num_reqs] bool: rows that may get drafts. A chunk gets none, nor does a request that has
        ended or that the drafter lacks KV of: what it computes for them is of no use to anybody."""
        limits, rows = self.target.state.tensors.draft_limit, step.batch.plan_rows
        slots = torch.tensor([row.slot for row in rows], device=limits.device)
        return (limits[slots] > 0) & (self.target.buffers.step.samples[: len(rows)] > 0)

    def _check_padding(self, reader: str, step: Step) -> None:
        """Past the live extent is what does no harm, whatever the graph reads of it."""
        for buffer in self._padded():
            live = buffer.live(step.batch.num_reqs, step.batch.num_tokens)
            assert live is not None and buffer.padding is not None
            if bool((buffer.tensor[live.stop :] != buffer.padding).any()):
                raise BadPadding(reader, buffer.name, buffer.padding, self.sanitizer.step)

    def _padded(self) -> Iterable[Buffer]:
        return (buffer for buffer in self.buffers if buffer.padding is not None)

    def _check_null_block(self, reader: str, before: Snapshot, after: Snapshot) -> None:
        for buffer in self.caches:
            then, now = before[buffer.name], after[buffer.name]
            if not _same_bits(then[:, NULL_BLOCK], now[:, NULL_BLOCK]):
                raise SanitizerError(
                    f"{reader}: the null block of `{buffer.name}` was written in step "
                    f"{self.sanitizer.step}"
                )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
