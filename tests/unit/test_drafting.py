"""What a drafter reads and writes, against slow twins, over whole poisoned extents."""

import random
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoop.batch.input_batch import InputBuffers
from stoop.ops.drafting import (
    PrefillTensors,
    commit_draft,
    draft_room,
    draw_as_target,
    look_up_ngrams,
    prepare_draft_decode,
    prepare_draft_prefill,
)
from stoop.ops.inputs import RowTensors, SlotTensors, StepTensors, commit_tokens
from stoop.ops.sampling import (
    DrawTensors,
    apply_min_p_,
    apply_top_k_top_p_,
    draw,
    temper_,
)
from support.slot_state import (
    BLOCK,
    MAX_LEN,
    MAX_TOKENS,
    NUM_DRAFTS,
    POISON,
    SLOTS,
    Row,
    Snapshot,
    no_stops,
    planned,
    poisoned_buffers,
    random_rows,
    random_state,
)

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)
SEEDS = st.integers(0, 2**32)


@dataclass
class Step:
    """A step whose tokens are known: phases I to U have run."""

    rows: list[Row]
    slots: SlotTensors
    buffers: InputBuffers
    num_taken: list[int]  # by row

    def num_known(self, index: int) -> int:
        return self.rows[index].num_known + self.num_taken[index]


def verified_step(rng: random.Random, rows: list[Row] | None = None) -> Step:
    """Each row that samples has accepted some of its drafts."""
    rows = random_rows(rng) if rows is None else rows
    slots, buffers = random_state(rng, rows).tensors, poisoned_buffers()
    for row in rows:  # no request goes beyond its limit
        if not row.ended:
            slots.token_limit[row.slot] = rng.randint(row.num_known + row.num_drafts + 1, MAX_LEN)
        slots.draft_limit[row.slot] = rng.randint(0, NUM_DRAFTS)
    buffers.load_rows(planned(rows))
    buffers.fill(slots, BLOCK)
    taken = [rng.randint(1, row.num_verified + 1) if row.samples else 0 for row in rows]
    sampled = torch.randint(1000, 2000, (SLOTS, NUM_DRAFTS + 1))
    counts = torch.tensor(taken + [0] * (SLOTS - len(rows)))
    commit_tokens(slots, no_stops(), buffers.rows, buffers.step, sampled, counts)
    return Step(rows, slots, buffers, taken)


def untouched(step: Step) -> dict[str, torch.Tensor]:
    groups = (step.buffers.rows, step.buffers.step)
    return {f.name: getattr(g, f.name).clone() for g in groups for f in fields(g)}


def check_untouched(step: Step, before: dict[str, torch.Tensor]) -> None:
    """The target's own rows and inputs belong to the step's other phases."""
    for name, value in untouched(step).items():
        assert torch.equal(value, before[name]), name


# ---- room ----


@SETTINGS
@given(SEEDS)
def test_room_equals_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    step = verified_step(rng)
    position_limit = rng.randint(1, MAX_LEN)
    expected = [0] * SLOTS
    for index, row in enumerate(step.rows):
        known = step.num_known(index)
        for _ in range(int(step.slots.draft_limit[row.slot])):
            drafts = expected[index] + 1
            # All of them, and the token behind them, may still be taken.
            fits = known + drafts + 1 <= int(step.slots.token_limit[row.slot])
            if row.samples and fits and known + drafts <= position_limit:
                expected[index] = drafts
    before, then = untouched(step), Snapshot.of(step.slots)
    assert draft_room(step.slots, step.buffers.step, position_limit).tolist() == expected
    check_untouched(step, before)
    then.check(step.slots)


@pytest.mark.parametrize(
    ("known", "wanted", "token_limit", "position_limit", "room"),
    [
        (10, 3, 21, 21, 3),
        (10, 2, 21, 21, 2),  # the request wants fewer
        (10, 0, 21, 21, 0),
        (10, 3, 13, 21, 2),  # two drafts and one more end the request
        (10, 3, 11, 21, 0),  # the next token ends it: nothing to guess
        (10, 3, 10, 21, 0),  # it has ended already
        (10, 3, 0, 21, 0),  # by a stop token
        (10, 3, 21, 12, 2),  # the head has fewer positions
        (10, 3, 21, 4, 0),
    ],
)
def test_room_by_each_limit(
    known: int, wanted: int, token_limit: int, position_limit: int, room: int
) -> None:
    step = verified_step(random.Random(0), [Row(2, known - 2, 1, known - 1)])
    step.slots.draft_limit[2] = wanted
    step.slots.token_limit[2] = token_limit
    found = draft_room(step.slots, step.buffers.step, position_limit)
    assert found.tolist() == [room] + [0] * (SLOTS - 1)


def test_a_chunk_has_no_room() -> None:
    step = verified_step(random.Random(0), [Row(2, 3, 4, 10)])
    step.slots.draft_limit[2] = NUM_DRAFTS
    assert not draft_room(step.slots, step.buffers.step, MAX_LEN).any()


# ---- draft prefill ----


def poisoned_prefill() -> PrefillTensors:
    return PrefillTensors(
        token_ids=torch.full((MAX_TOKENS,), POISON, dtype=torch.int32),
        last_token_indices=torch.full((SLOTS,), POISON),
        room=torch.full((SLOTS,), POISON),
    )


@SETTINGS
@given(SEEDS)
def test_draft_prefill_equals_the_slow_twin(seed: int) -> None:
    step = verified_step(random.Random(seed))
    token_ids, last = [0] * MAX_TOKENS, [0] * SLOTS
    token = 0
    for index, row in enumerate(step.rows):
        known = step.num_known(index)
        for offset in range(row.num_tokens):
            follows = row.num_computed + offset + 1
            if offset < row.num_live and follows < known:
                token_ids[token] = int(step.slots.token_ids[row.slot, follows])
                if row.samples:
                    last[index] = token  # the last position that a known token follows
            token += 1
    before, then = untouched(step), Snapshot.of(step.slots)
    out = poisoned_prefill()
    prepare_draft_prefill(step.slots, step.buffers.rows, step.buffers.step, out, 40)
    assert torch.equal(out.room, draft_room(step.slots, step.buffers.step, 40))
    assert out.token_ids.tolist() == token_ids
    assert out.last_token_indices.tolist() == last
    check_untouched(step, before)
    then.check(step.slots)


def test_draft_prefill_of_one_row_of_each_kind() -> None:
    """A decode of four places that accepts one of two drafts, a chunk, and a prompt's end."""
    rows = [Row(0, 9, 4, 10, 2), Row(1, 4, 3, 12), Row(2, 2, 3, 5)]
    state, buffers = random_state(random.Random(3), rows), poisoned_buffers()
    slots = state.tensors
    buffers.load_rows(planned(rows))
    buffers.fill(slots, BLOCK)
    sampled = torch.tensor([[71, 72, 0, 0], [0] * 4, [81, 0, 0, 0], [0] * 4, [0] * 4])
    counts = torch.tensor([2, 0, 1, 0, 0])
    commit_tokens(slots, no_stops(), buffers.rows, buffers.step, sampled, counts)
    out = poisoned_prefill()
    prepare_draft_prefill(slots, buffers.rows, buffers.step, out, 40)
    chunk, prompt = slots.token_ids[1].tolist(), slots.token_ids[2].tolist()
    expected = [71, 72, 0, 0, *chunk[5:8], prompt[3], prompt[4], 81]
    assert out.token_ids.tolist() == expected + [0] * (MAX_TOKENS - 10)
    assert out.last_token_indices.tolist() == [1, 0, 9, 0, 0]


# ---- draft decode ----


def poisoned_decode(step: Step) -> tuple[torch.Tensor, StepTensors]:
    """Buffers of draft decodes: their own, but for what they share with the target's."""

    def full(dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((SLOTS,), POISON, dtype=dtype)

    own = replace(
        step.buffers.step,
        input_ids=full(torch.int32),
        positions=full(),
        slot_mapping=full(),
        context_lens=full(torch.int32),
        seq_lens=full(torch.int32),
    )
    return torch.full((SLOTS + 1,), POISON, dtype=torch.int32), own


def draft_rooms(rng: random.Random, step: Step) -> torch.Tensor:
    """Room of every row, and drafts that stand there already, fewer or as many."""
    room = draft_room(step.slots, step.buffers.step, MAX_LEN)
    for index, row in enumerate(step.rows):
        step.slots.num_drafts[row.slot] = rng.randint(0, int(room[index]))
    return room


@SETTINGS
@given(SEEDS)
def test_draft_decode_equals_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    step = verified_step(rng)
    room = draft_rooms(rng, step)
    expected: dict[str, list[int]] = {
        "input_ids": [0] * SLOTS,
        "positions": [0] * SLOTS,
        "slot_mapping": [-1] * SLOTS,
        "context_lens": [0] * SLOTS,
        "seq_lens": [1 if index < len(step.rows) else 0 for index in range(SLOTS)],
    }
    for index, row in enumerate(step.rows):
        drafted = int(step.slots.num_drafts[row.slot])
        if row.ended or drafted >= int(room[index]):
            continue
        text = step.slots.token_ids[row.slot].tolist()
        newest = step.num_known(index) + drafted - 1
        position = newest - 1  # slot i has the embedding of token i + 1
        block = int(step.slots.block_table[row.slot, position // BLOCK])
        expected["input_ids"][index] = text[newest]
        expected["positions"][index] = expected["context_lens"][index] = position
        expected["seq_lens"][index] = position + 1
        expected["slot_mapping"][index] = block * BLOCK + position % BLOCK
    before, then = untouched(step), Snapshot.of(step.slots)
    starts, out = poisoned_decode(step)
    rows = RowTensors(step.buffers.rows.idx_mapping, starts)
    prepare_draft_decode(step.slots, rows, step.buffers.step, room, BLOCK, starts, out)
    for name, values in expected.items():
        assert getattr(out, name).tolist() == values, name
    count = len(step.rows)
    assert starts.tolist() == [*range(count + 1), *[count] * (SLOTS - count)]
    check_untouched(step, before)
    then.check(step.slots)


# ---- commit ----


@SETTINGS
@given(SEEDS)
def test_draft_commit_equals_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    step = verified_step(rng)
    room = draft_rooms(rng, step)
    count = rng.randint(len(step.rows), SLOTS)  # a graph's extent holds every live row
    drafts = torch.randint(2000, 3000, (count,))
    then, before, numbers = Snapshot.of(step.slots), untouched(step), [-1] * count
    for index, row in enumerate(step.rows):
        slot = row.slot
        if then.num_drafts[slot] < int(room[index]):
            numbers[index] = then.num_drafts[slot]
            place = then.num_tokens[slot] + then.num_drafts[slot]
            then.token_ids[slot][place] = int(drafts[index])
            then.num_drafts[slot] += 1
    rooms = room.clone()
    assert commit_draft(step.slots, step.buffers.step, room, drafts).tolist() == numbers
    then.check(step.slots)
    assert torch.equal(room, rooms)
    check_untouched(step, before)


@SETTINGS
@given(SEEDS)
def test_drafts_fill_their_room_and_no_more(seed: int) -> None:
    """As many rounds as there may be drafts: every row ends with all that it has room for."""
    step = verified_step(random.Random(seed))
    room = draft_room(step.slots, step.buffers.step, MAX_LEN)
    then = Snapshot.of(step.slots)
    for number in range(NUM_DRAFTS):
        drafts = torch.arange(SLOTS) + 100 * (number + 1)
        commit_draft(step.slots, step.buffers.step, room, drafts)
    for index, row in enumerate(step.rows):
        if row.ended:
            continue
        wanted = [index + 100 * (number + 1) for number in range(int(room[index]))]
        known = then.num_tokens[row.slot]
        then.token_ids[row.slot][known : known + len(wanted)] = wanted
        then.num_drafts[row.slot] = len(wanted)
    then.check(step.slots)


# ---- prompt lookup ----


def look_up_slowly(text: list[int], sizes: tuple[int, int], room: int) -> list[int]:
    """The longest repetition of the end, of those the earliest; what followed it."""
    least, most = sizes
    for size in range(min(most, len(text)), least - 1, -1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[-size:]:
                return text[start + size :][:room]
    return []


@SETTINGS
@given(SEEDS)
def test_lookup_equals_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    step = verified_step(rng)
    step.slots.token_ids.random_(1, rng.choice((2, 3, 4, 9)))  # few tokens: they repeat
    least = rng.randint(1, 4)
    sizes = (least, rng.randint(least, 6))
    room = draft_room(step.slots, step.buffers.step, MAX_LEN)
    then, before, rooms = Snapshot.of(step.slots), untouched(step), room.clone()
    for index, row in enumerate(step.rows):
        if row.ended:
            continue
        known = then.num_tokens[row.slot]
        drafts = look_up_slowly(then.token_ids[row.slot][:known], sizes, int(room[index]))
        then.token_ids[row.slot][known : known + len(drafts)] = drafts
        then.num_drafts[row.slot] = len(drafts)
    look_up_ngrams(step.slots, step.buffers.step, room, sizes, NUM_DRAFTS)
    then.check(step.slots)
    assert torch.equal(room, rooms)
    check_untouched(step, before)


@pytest.mark.parametrize(
    ("text", "sizes", "drafts"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], (1, 4), [9, 8, 7]),
        ([1, 2, 3, 4, 1, 2], (2, 4), [3, 4, 1]),
        ([5, 2, 6, 1, 2, 7, 1, 2], (1, 4), [7, 1, 2]),  # two tokens outweigh an earlier one
        ([2, 6, 8, 2, 7, 8, 2], (1, 1), [6, 8, 2]),  # of equals the first
        ([1, 2, 3, 4], (1, 4), []),
        ([1, 2, 3, 1], (2, 4), []),  # one token repeats, two are asked for
        ([4, 4], (1, 4), [4]),  # no more than is known
        ([4], (1, 4), []),
    ],
)
def test_lookup_of_small_texts(text: list[int], sizes: tuple[int, int], drafts: list[int]) -> None:
    # What stands behind the known tokens repeats them, and must not be taken for text.
    known = len(text)
    step = verified_step(random.Random(1), [Row(3, 0, known, known)])
    step.slots.token_ids[3, :known] = torch.tensor(text)
    step.slots.token_ids[3, known:] = text[0]
    step.slots.num_tokens[3] = known
    room = torch.tensor([NUM_DRAFTS] + [0] * (SLOTS - 1))
    look_up_ngrams(step.slots, step.buffers.step, room, sizes, NUM_DRAFTS)
    count = int(step.slots.num_drafts[3])
    assert step.slots.token_ids[3, known : known + count].tolist() == drafts


# ---- drafts drawn with the target's noise ----


@dataclass
class Coupled:
    """A step with some drafts already, and what draws the next ones of all its rows."""

    step: Step
    how: DrawTensors
    logits: torch.Tensor  # [rows, 40]
    ids: torch.Tensor  # [40] of 160: the target's numbers

    @staticmethod
    def make(rng: random.Random) -> "Coupled":
        step = verified_step(rng)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        count = step.slots.num_tokens.shape[0]
        step.slots.num_drafts.copy_(torch.randint(0, 3, (count,), generator=generator))

        def each(*values: float) -> torch.Tensor:
            return torch.tensor([rng.choice(values) for _ in range(count)])

        how = DrawTensors(
            temperature=each(0.0, 0.5, 1.0, 1.7),
            seeds=torch.randint(-(2**62), 2**62, (count,), generator=generator),
            min_p=each(0.0, 0.0, 0.1),
            top_k=each(0, 0, 1, 5).long(),
            top_p=each(1.0, 1.0, 0.3, 0.9),
        )
        logits = torch.randn(len(step.rows), 40, generator=generator)
        return Coupled(step, how, logits, torch.tensor(sorted(rng.sample(range(160), 40))))

    @property
    def slot(self) -> torch.Tensor:
        return self.step.buffers.step.row_slots[: len(self.step.rows)]

    def draw(self, filters: bool) -> torch.Tensor:
        """Drafts, numbered as the target does."""
        d2t = self.ids - torch.arange(40)
        step = self.step
        found = draw_as_target(
            self.logits.clone(), step.slots, step.buffers.step, self.how, d2t, filters
        )
        return found + d2t[found]

    def target_draws(self, filters: bool) -> torch.Tensor:
        """By a target that has the same logits, and none elsewhere."""
        slot, how = self.slot, self.how
        full = torch.full((len(self.step.rows), 160), float("-inf"))
        full[:, self.ids] = self.logits
        temper_(full, how.temperature[slot])
        if filters:
            apply_min_p_(full, how.min_p[slot])
            apply_top_k_top_p_(full, how.top_k[slot], how.top_p[slot], 160)
        places = self.step.slots.num_tokens[slot] + self.step.slots.num_drafts[slot]
        return draw(full, how.temperature[slot], how.seeds[slot], places)


@pytest.mark.parametrize("filters", [False, True])
@SETTINGS
@given(seed=SEEDS)
def test_a_head_that_is_the_target_drafts_what_the_target_draws(seed: int, filters: bool) -> None:
    """Token for token, at any temperature, with a vocabulary of its own."""
    case = Coupled.make(random.Random(seed))
    assert torch.equal(case.draw(filters), case.target_draws(filters))


def test_coupled_drafts_are_the_likeliest_where_nothing_is_drawn() -> None:
    others = 0
    for seed in range(20):
        case = Coupled.make(random.Random(seed))
        likeliest = case.ids[case.logits.argmax(dim=1)]
        others += int((case.draw(filters=True) != likeliest).sum())
        ones = torch.ones_like(case.how.top_k)
        for how in (replace(case.how, temperature=ones * 0.0), replace(case.how, top_k=ones)):
            assert torch.equal(replace(case, how=how).draw(filters=True), likeliest)
    assert others > 10


@pytest.mark.parametrize("seed", range(4))
def test_coupled_drafts_stand_as_often_as_theory_says(seed: int) -> None:
    """Which is never below (1 - d) / (1 + d), d being the distance of the two distributions."""
    generator = torch.Generator().manual_seed(seed)
    target, own = torch.randn(2, 7, generator=generator, dtype=torch.float64) * 1.5
    p, q = target.softmax(0), own.softmax(0)
    worst = torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(dim=1)
    chance, distance = float((1 / worst).sum()), float((p - q).abs().sum() / 2)
    assert (1 - distance) / (1 + distance) < chance < 1 - distance
    step = verified_step(random.Random(seed))
    rounds, rows = 2_500, len(step.rows)
    slot = step.buffers.step.row_slots[:rows]
    ones = torch.ones_like(step.slots.num_tokens)
    equal = torch.zeros(rows)
    for number in range(rounds):
        seeds = ones * number + torch.arange(len(ones)) * rounds
        how = DrawTensors(ones * 1.0, seeds, ones * 0.0, ones * 0, ones * 1.0)
        drafts = draw_as_target(
            own.expand(rows, -1).clone(), step.slots, step.buffers.step, how, None, False
        )
        places = step.slots.num_tokens[slot] + step.slots.num_drafts[slot]
        equal += drafts == draw(target.expand(rows, -1), how.temperature[slot], seeds[slot], places)
    for share in (equal / rounds).tolist():
        assert abs(share - chance) < 4.5 * (chance * (1 - chance) / rounds) ** 0.5
