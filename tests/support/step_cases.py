"""Random steps over random slot state and poisoned buffers, to compare kernels with torch."""

import copy
import random
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from stoop.ops import inputs as reference
from stoop.ops.inputs import TOKEN_BUFFERS, RowTensors, SlotTensors, StepTensors, StopTensors

SEEDS = pytest.mark.parametrize("seed", range(30))
BLOCK = 4  # tokens of a KV block
POISON = 77
INT32 = ("token_ids", "block_table", "query_start_loc", "input_ids", "samples")
INT32 += ("context_lens", "seq_lens")
STOP_WIDTH = 5  # stop ids that a slot may have
SAMPLED = range(1000, 1010)  # few: stop ids are among them


@dataclass
class Case:
    """A step: its slots, the rows that the host wrote, and buffers."""

    slots: SlotTensors
    rows: RowTensors
    step: StepTensors
    stops: StopTensors
    num_live: int  # rows
    num_drafts: int  # K

    def copy(self) -> "Case":
        return copy.deepcopy(self)

    @property
    def max_reqs(self) -> int:
        return self.rows.idx_mapping.shape[0]

    @property
    def max_tokens(self) -> int:
        return self.step.input_ids.shape[0]

    @property
    def max_len(self) -> int:
        return self.slots.token_ids.shape[1]


def make_case(max_reqs: int, max_tokens: int, max_len: int, num_drafts: int = 3) -> Case:
    """All padding; buffers are poisoned."""
    max_blocks = -(-max_len // BLOCK)
    slots = max_reqs + 2  # a slot may be free while all rows are taken
    shapes = {"token_ids": (slots, max_len), "block_table": (slots, max_blocks)}
    shapes |= {"query_start_loc": (max_reqs + 1,), "stop_ids": (slots, STOP_WIDTH)}
    shapes |= dict.fromkeys(TOKEN_BUFFERS, (max_tokens,))

    def make(kind: Any, value: int, size: int) -> Any:
        def full(name: str) -> Tensor:
            dtype = torch.int32 if name in INT32 else torch.int64
            return torch.full(shapes.get(name, (size,)), value, dtype=dtype)

        return kind(**{field.name: full(field.name) for field in fields(kind)})

    rows: RowTensors = make(RowTensors, 0, max_reqs)
    rows.idx_mapping.fill_(-1)
    step = make(StepTensors, POISON, max_reqs)
    stops = make(StopTensors, 0, slots)
    return Case(make(SlotTensors, 0, slots), rows, step, stops, 0, num_drafts)


def random_case(rng: random.Random) -> Case:
    """Decodes with drafts and dead tokens, prompts, chunks, rows at the model's limit, and rows
    whose requests have ended.

    Every slot is full of what former holders may have left.
    """
    max_reqs, max_tokens = rng.choice(((1, 7), (4, 40), (5, 40), (6, 40), (6, 150), (40, 170)))
    case = make_case(max_reqs, max_tokens, max_len=23, num_drafts=rng.choice((1, 3, 8)))
    slots = case.slots
    torch.manual_seed(rng.randrange(2**31))
    for field in fields(slots):
        high = 1000 if field.name in ("token_ids", "block_table") else case.max_len
        getattr(slots, field.name).random_(0, high)
    for counter in (slots.num_tokens, slots.num_computed, slots.num_drafts, slots.token_limit):
        counter[-1] = 0  # the sink's
    _fill_stops(rng, case)
    used = rng.sample(range(slots.sink), rng.randint(0, max_reqs))
    start = 0
    for row, slot in enumerate(used):
        start += _fill_row(rng, case, slot, max_tokens - start)
        case.rows.idx_mapping[row] = slot
        case.rows.query_start_loc[row + 1 :] = start
    case.num_live = len(used)
    return case


def _fill_stops(rng: random.Random, case: Case) -> None:
    """Stop ids of every slot and the sink; ids past the count are left from a former holder."""
    stops = case.stops
    for slot in range(case.slots.sink + 1):
        stops.min_tokens[slot] = rng.choice((0, 0, rng.randint(1, case.max_len)))
        stops.stop_counts[slot] = rng.randint(0, STOP_WIDTH)
        stops.stop_ids[slot] = torch.tensor(rng.sample(SAMPLED, STOP_WIDTH))


def _fill_row(rng: random.Random, case: Case, slot: int, budget: int) -> int:
    """Returns the number of query tokens; now and then none."""
    slots, limit = case.slots, case.max_len - 1
    known = rng.choice((rng.randint(1, limit), limit, 1))
    drafts = rng.randint(0, min(case.num_drafts, limit - known))
    if rng.random() < 0.5:
        computed, count = known - 1, case.num_drafts + 1
    else:
        computed = rng.randint(0, known - 1)
        left = known - computed
        most = left + drafts + case.num_drafts
        count = rng.choice((1, left, left + rng.randint(0, drafts), rng.randint(0, most)))
    slots.num_tokens[slot], slots.num_computed[slot] = known, computed
    slots.num_drafts[slot] = drafts
    slots.draft_limit[slot] = rng.randint(0, case.num_drafts)
    slots.num_prompt_tokens[slot] = rng.randint(1, known)
    slots.token_limit[slot] = rng.randint(known + drafts + 1, case.max_len)
    if rng.random() < 0.15:  # it has ended, by a stop token or by its limit
        slots.token_limit[slot] = rng.choice((0, known, rng.randint(0, known)))
    return min(count, budget)


def random_verdict(rng: random.Random, case: Case) -> tuple[Tensor, Tensor]:
    """What a prepared step may produce; entries that must not be read hold stop ids or garbage."""
    low, high = rng.choice(((10**9, 2**40), (SAMPLED.start, SAMPLED.stop)))
    sampled = torch.randint(low, high, (case.max_reqs, case.num_drafts + 1))
    counts = torch.zeros(case.max_reqs, dtype=torch.int64)
    for row in range(case.num_live):
        if case.step.samples[row]:
            counts[row] = rng.randint(1, int(case.step.row_drafts[row]) + 1)
            for place in range(int(counts[row])):
                sampled[row, place] = rng.choice(SAMPLED)
    return sampled, counts


def prepared_case(rng: random.Random) -> Case:
    """Phase I has run."""
    case = random_case(rng)
    reference.prepare_inputs(case.slots, case.rows, case.step, BLOCK)
    return case


def verified_case(rng: random.Random) -> Case:
    """Phases I to U have run."""
    case = prepared_case(rng)
    verdict = random_verdict(rng, case)
    reference.commit_tokens(case.slots, case.stops, case.rows, case.step, *verdict)
    return case


def check_equal(ours: Any, theirs: Any, skip: tuple[str, ...] = ()) -> None:
    """Compare two groups of tensors, element by element."""
    for field in fields(ours):
        if field.name not in skip:
            mine, other = getattr(ours, field.name), getattr(theirs, field.name)
            assert mine.dtype == other.dtype and torch.equal(mine, other), field.name


def check_slots(ours: Case, theirs: Case, before: Case) -> None:
    """Compare with the reference, except that kernels leave the sink unchanged."""
    assert torch.equal(ours.slots.token_ids[:-1], theirs.slots.token_ids[:-1])
    assert torch.equal(ours.slots.token_ids[-1], before.slots.token_ids[-1])
    check_equal(ours.slots, theirs.slots, skip=("token_ids",))


# ---- for an H200 ----


def engine_case(num_drafts: int) -> Case:
    return make_case(256, 2048, 8192, num_drafts)


def check_compiled(found: list[Any], count: int) -> None:
    assert len(found) == count
    for compiled in found:
        print(compiled)
        assert compiled.spilled == 0 and compiled.registers <= 128
