"""Random slot state and steps over it, for tests of the phases that run on the device."""

import random
from dataclasses import dataclass, fields
from typing import Any

import torch

from stoop.batch.input_batch import InputBuffers
from stoop.batch.request_state import RequestState
from stoop.core.step import PlannedRow
from stoop.ops.inputs import SlotTensors, StopTensors
from support.scheduling import make_rules

CPU = torch.device("cpu")
SLOTS, MAX_LEN, BLOCK, MAX_TOKENS = 5, 21, 4, 30
MAX_BLOCKS = -(-MAX_LEN // BLOCK)
NUM_DRAFTS = 3  # K
POISON = 77
STOP_WIDTH = 4  # stop ids that a slot may have


@dataclass
class Row:
    slot: int
    num_computed: int
    num_tokens: int  # of this step, dead ones included
    num_known: int
    num_drafts: int = 0
    ended: bool = False  # its request has, which the host did not know

    @property
    def num_live(self) -> int:
        """Query tokens that are known or drafts; the rest are dead."""
        if self.ended:
            return 0
        return min(self.num_tokens, self.num_known + self.num_drafts - self.num_computed)

    @property
    def seq_len(self) -> int:
        return self.num_computed + self.num_live

    @property
    def samples(self) -> bool:
        return not self.ended and self.seq_len >= self.num_known

    @property
    def num_verified(self) -> int:
        """Drafts that this step has a place for."""
        return 0 if self.ended else max(self.seq_len - self.num_known, 0)


def planned(rows: list[Row]) -> list[PlannedRow]:
    rules = make_rules()
    return [
        PlannedRow(
            request_id=f"r{row.slot}",
            epoch=0,
            slot=row.slot,
            num_tokens=row.num_tokens,
            num_computed=row.num_computed,
            seq_len=min(row.num_computed + row.num_tokens, MAX_LEN),
            num_reserved=MAX_LEN,
            samples=row.samples,
            decodes=row.num_known - row.num_computed == 1,
            rules=rules,
            num_prompt_tokens=1,
        )
        for row in rows
    ]


def random_rows(rng: random.Random, max_drafts: int = NUM_DRAFTS) -> list[Row]:
    """Decodes with places for all drafts, prompts, chunks, and rows in between.

    A step at the model's limit, with more places than there are tokens to come, is among them, and
    rows whose requests have ended.
    """
    rows, budget = [], MAX_TOKENS
    for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
        known = rng.choice((rng.randint(1, MAX_LEN - 1), MAX_LEN - 1, 1))
        drafts = rng.randint(0, min(max_drafts, MAX_LEN - 1 - known))
        if rng.random() < 0.5:
            computed, count = known - 1, max_drafts + 1
        else:
            computed = rng.randint(0, known - 1)
            left = known - computed
            most = left + drafts + max_drafts
            cut = left + rng.randint(0, drafts)
            count = rng.choice((1, left, cut, rng.randint(1, left), rng.randint(1, most)))
        count = min(count, budget)
        if count:
            rows.append(Row(slot, computed, count, known, drafts, rng.random() < 0.15))
            budget -= count
    return rows


def random_state(rng: random.Random, rows: list[Row]) -> RequestState:
    """Every slot full of what former holders may have left; live slots as the rows say."""
    state = RequestState(SLOTS, MAX_LEN, BLOCK, CPU)
    slots = state.tensors
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    slots.token_ids.random_(1, 1000, generator=generator)
    slots.block_table.random_(1, 1000, generator=generator)
    for field in fields(slots):
        if field.name not in ("token_ids", "block_table"):
            getattr(slots, field.name).random_(0, MAX_LEN, generator=generator)
    for counter in (slots.num_tokens, slots.num_computed, slots.num_drafts, slots.token_limit):
        counter[-1] = 0  # the sink's
    for row in rows:
        slots.num_tokens[row.slot] = row.num_known
        slots.num_computed[row.slot] = row.num_computed
        slots.num_drafts[row.slot] = row.num_drafts
        slots.num_prompt_tokens[row.slot] = rng.randint(1, row.num_known)
        # By a stop token, or by its limit; else there is room for its drafts and the next token.
        limits = (0, row.num_known) if row.ended else (row.num_known + row.num_drafts + 1, MAX_LEN)
        slots.token_limit[row.slot] = rng.choice(limits)
    return state


def no_stops() -> StopTensors:
    return StopTensors(
        torch.zeros(SLOTS + 1, dtype=torch.int64),
        torch.zeros(SLOTS + 1, dtype=torch.int64),
        torch.zeros(SLOTS + 1, STOP_WIDTH, dtype=torch.int64),
    )


def random_stops(rng: random.Random, vocabulary: range) -> StopTensors:
    """Stop ids of every slot and the sink; ids past the count are left from a former holder."""
    stops = no_stops()
    for slot in range(SLOTS + 1):
        stops.min_tokens[slot] = rng.choice((0, 0, rng.randint(1, MAX_LEN)))
        stops.stop_counts[slot] = rng.randint(0, STOP_WIDTH)
        stops.stop_ids[slot] = torch.tensor(rng.sample(vocabulary, STOP_WIDTH))
    return stops


def poison(group: Any) -> None:
    """As a larger step with wild values would leave it."""
    for field in fields(group):
        getattr(group, field.name).fill_(POISON)


def poisoned_buffers() -> InputBuffers:
    buffers = InputBuffers(SLOTS, MAX_TOKENS, CPU)
    poison(buffers.rows)
    poison(buffers.step)
    return buffers


@dataclass
class Snapshot:
    """Slot state at one moment, in plain lists."""

    values: dict[str, list]

    @staticmethod
    def of(slots: SlotTensors) -> "Snapshot":
        return Snapshot({f.name: getattr(slots, f.name).tolist() for f in fields(slots)})

    def __getattr__(self, name: str) -> list:
        return self.values[name]

    def check(self, slots: SlotTensors) -> None:
        """Compare with the slots now, including all of the sink but its tokens."""
        for name, expected in self.values.items():
            found = getattr(slots, name).tolist()
            if name == "token_ids":
                found, expected = found[:-1], expected[:-1]
            assert found == expected, name
