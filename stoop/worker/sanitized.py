"""A runner's step under the sanitizer: stale reads refused, replays compared with eager."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stoop.core.kv_layout import NULL_BLOCK
from stoop.graph.descriptor import RunMode
from stoop.graph.sanitizer import (
    BadPadding,
    Buffer,
    Lifetime,
    MovedBuffer,
    ReplayMismatch,
    Sanitizer,
    SanitizerError,
)
from stoop.ops.inputs import PADDING, TOKEN_BUFFERS
from stoop.sampling.verifier import Verdict

if TYPE_CHECKING:
    from stoop.worker.runner import ModelRunner, Step

INPUTS = "inputs, eager"
# A block id that no cache has: to read with it is an error, not a wrong answer.
POISON_BLOCK = 2**30


def declare_buffers(runner: "ModelRunner") -> list[Buffer]:
    """Every persistent buffer that phases hand to each other, by lifetime."""
    found = [Buffer("hidden", runner.hidden, Lifetime.STEP)]
    if runner.taps is not None:
        found.append(Buffer("taps", runner.taps, Lifetime.STEP))
    found.append(Buffer("verdict", runner.verdict.packed, Lifetime.STEP))
    found += _fields(runner.buffers.rows, Lifetime.STEP)
    found += _fields(runner.buffers.step, Lifetime.STEP)
    for name, tensor in runner.backend.buffers().items():
        found.append(Buffer(name, tensor, Lifetime.STEP))
    found += _fields(runner.state.tensors, Lifetime.SLOT)
    found += _fields(runner.sampling_state, Lifetime.SLOT)
    for layer, cache in enumerate(runner.kv_caches):
        found.append(Buffer(f"kv_cache {layer}", cache, Lifetime.SLOT))
    for name, weight in runner.model.named_parameters():
        found.append(Buffer(name, weight.data, Lifetime.CONSTANT))
    if runner.speculator is not None:
        found += runner.speculator.buffers()
    return found


def _fields(group: Any, lifetime: Lifetime) -> list[Buffer]:
    return [Buffer(f.name, getattr(group, f.name), lifetime) for f in fields(group)]


class StepSanitizer:
    def __init__(self, runner: "ModelRunner") -> None:
        self.runner = runner
        declared = declare_buffers(runner)
        self.addresses = {b.name: b.tensor.data_ptr() for b in declared}
        assert len(self.addresses) == len(declared), "two buffers of one name"
        self.buffers = [b for b in declared if b.lifetime is not Lifetime.CONSTANT]
        self.sanitizer = Sanitizer(self.buffers)
        runner.buffers.load_rows([])
        self.sanitizer.learn(INPUTS, runner.inputs)

    def learn(self, key: Any, function: Callable[[], object]) -> None:
        self.sanitizer.learn(key, function)

    def check_reads(self, key: Any, reader: str) -> None:
        self.sanitizer.check_reads(key, reader)

    def begin_draft_decode(self) -> None:
        self.sanitizer.begin_draft_decode()

    def begin_step(self) -> None:
        for buffer in declare_buffers(self.runner):
            if buffer.tensor.data_ptr() != self.addresses[buffer.name]:
                raise MovedBuffer(buffer.name)
        self.sanitizer.begin_step()
        self.runner.buffers.forget_rows()

    def run(self, step: "Step") -> None:
        """Replay, then the same phases eagerly from the same state; both must agree to the bit."""
        runner, reader = self.runner, str(step.descriptor)
        self._poison_block_tables(step)
        if step.descriptor.mode is not RunMode.STEP:
            self.sanitizer.check_reads(INPUTS, INPUTS)
        blocks = self._blocks(step)
        before = self._snapshot(blocks)
        runner.run_phases(step, step.metadata, replay=True)
        replayed = self._snapshot(blocks)
        self._restore(before, blocks)
        runner.run_phases(step, runner.backend.build(step.batch), replay=False)
        eager = self._snapshot(blocks)
        self._check_padding(reader, step)
        self._compare(reader, step, replayed, eager)
        self._check_null_block(reader, before, replayed)

    def _poison_block_tables(self, step: "Step") -> None:
        """What a slot's former holder left behind its last block must not be walked."""
        table = self.runner.state.tensors.block_table
        for row in step.batch.plan_rows:
            table[row.slot, -(-row.num_reserved // self.runner.block_size) :] = POISON_BLOCK

    def _blocks(self, step: "Step") -> Tensor:
        """The null block, then every block that a row of the batch may touch."""
        table, found = self.runner.state.tensors.block_table, [NULL_BLOCK]
        for row in step.batch.plan_rows:
            found += table[row.slot, : -(-row.num_reserved // self.runner.block_size)].tolist()
        return torch.tensor(sorted(set(found)), device=table.device)

    def _snapshot(self, blocks: Tensor) -> dict[str, Tensor]:
        """All buffers, of KV caches only the blocks."""
        return {
            b.name: b.tensor.index_select(1, blocks) if _is_cache(b) else b.tensor.clone()
            for b in self.buffers
        }

    def _restore(self, snapshot: dict[str, Tensor], blocks: Tensor) -> None:
        for buffer in self.buffers:
            saved = snapshot[buffer.name]
            if _is_cache(buffer):
                buffer.tensor.index_copy_(1, blocks, saved)
            else:
                buffer.tensor.copy_(saved)

    def _compare(
        self, reader: str, step: "Step", replayed: dict[str, Tensor], eager: dict[str, Tensor]
    ) -> None:
        """Live parts only: what stands in padding and in the sink is nobody's."""
        sink = self.runner.state.tensors.sink
        batch = step.batch
        live = dict.fromkeys(("hidden", "taps"), batch.num_tokens)
        live["draft features"] = batch.num_reqs
        live["verdict"] = batch.num_reqs
        for buffer in self.buffers:
            if buffer.lifetime is Lifetime.SLOT:
                end = None if _is_cache(buffer) else sink
            elif buffer.name in live:
                end = live[buffer.name]
            else:
                continue
            ours, theirs = replayed[buffer.name], eager[buffer.name]
            if buffer.name == "verdict":
                ours, theirs = self._verdict_by_row(ours), self._verdict_by_row(theirs)
            if not _same_bits(ours[:end], theirs[:end]):
                raise ReplayMismatch(reader, buffer.name, self.sanitizer.step)

    def _verdict_by_row(self, packed: Tensor) -> Tensor:
        verdict = Verdict.of(packed, self.runner.verdict.num_tokens.shape[0])
        columns = (verdict.num_tokens, verdict.num_drafts)
        return torch.cat((verdict.token_ids, torch.stack(columns, dim=1)), dim=1)

    def _check_padding(self, reader: str, step: "Step") -> None:
        """Past the live extent stands what does no harm, whatever the graph reads of it."""
        for name, harmless in PADDING.items():
            batch = step.batch
            end = batch.num_tokens if name in TOKEN_BUFFERS else batch.num_reqs
            if bool((getattr(self.runner.buffers.step, name)[end:] != harmless).any()):
                raise BadPadding(reader, name, harmless, self.sanitizer.step)

    def _check_null_block(
        self, reader: str, before: dict[str, Tensor], after: dict[str, Tensor]
    ) -> None:
        for layer in range(len(self.runner.kv_caches)):
            name = f"kv_cache {layer}"
            if not _same_bits(before[name][:, NULL_BLOCK], after[name][:, NULL_BLOCK]):
                raise SanitizerError(
                    f"{reader}: the null block of `{name}` was written in step "
                    f"{self.sanitizer.step}"
                )


def _is_cache(buffer: Buffer) -> bool:
    return buffer.name.startswith("kv_cache")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
