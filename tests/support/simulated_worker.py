"""A worker that only keeps books, for the scheduler to run against.

The worker follows a plan as the real one does (slot state, block tables, token history) but in
place of keys and values it records, for each place of each block, which text was written there.
So a wrong, shared, stale or lost block shows in the step that reads it.

Its layers may have recurrent state, too (`simulated_states`).

It can draft too, right and wrong tokens at random. A drafter's place in a block also records the
next token, as an EAGLE head's KV depends on it, so that a block with another continuation is wrong.
"""

import dataclasses
import random
from typing import TYPE_CHECKING

from stoop.core.request import Request
from stoop.core.step import Admission, PlannedRow, RowResult, StepPlan, StepResult
from stoop.scheduler.block_pool import NULL_BLOCK
from support.simulated_states import SlotStates

if TYPE_CHECKING:
    from support.scheduler_simulation import World

VOCAB = 6
STOP = 0
_PRIME = 2**61 - 1


def text_key(before: int, token: int) -> int:
    """Names a whole text: the key of all but its last token, and that token."""
    return (before * 1_000_003 + token + 1) % _PRIME


def text_keys(tokens: list[int]) -> list[int]:
    keys, key = [], 1
    for token in tokens:
        key = text_key(key, token)
        keys.append(key)
    return keys


def next_token(tokens: list[int]) -> int:
    """The model: any text has exactly one continuation."""
    return random.Random(text_keys(tokens)[-1]).randrange(VOCAB)


def undisturbed(request: Request, max_model_len: int) -> list[int]:
    """What a request must answer, whatever other requests do."""
    tokens = list(request.prompt_token_ids)
    rules = request.rules
    while True:
        tokens.append(next_token(tokens))
        num_output = len(tokens) - request.num_prompt_tokens
        stopped = tokens[-1] in rules.stop_ids and num_output > rules.params.min_tokens
        if stopped or num_output >= rules.max_tokens or len(tokens) >= max_model_len:
            return tokens[request.num_prompt_tokens :]


Place = tuple[int, int]  # block, and offset in it
REJECTED = (-1, -1)  # what a rejected draft leaves: reading it is an error


def _lasting(row: PlannedRow) -> tuple[object, ...]:
    """What a device may keep of a row in the next step."""
    return row.request_id, row.epoch, row.slot, row.num_tokens, row.decodes, row.rules


class BookkeepingWorker:
    """A device: slot state as in `stoop.batch`, phases as in `stoop.ops`, texts in place of KV.

    It runs plans in launch order and follows its own counters, whatever the host assumes: a plan
    may be made before the host knows what earlier ones produced, or that a request has ended.
    """

    def __init__(self, world: "World") -> None:
        self.world, self.block_size = world, world.block_size
        num_slots, max_model_len = world.max_num_seqs, world.max_model_len
        max_blocks = -(-max_model_len // world.block_size)
        self.token_ids = [[-1] * max_model_len for _ in range(num_slots)]
        self.num_tokens = [0] * num_slots
        self.num_computed = [0] * num_slots
        self.num_drafts = [0] * num_slots
        self.draft_limit = [0] * num_slots
        self.has_gap = [False] * num_slots  # the drafter lacks KV of the slot's last tokens
        self.token_limit = [0] * num_slots
        self.admissions: list[Admission | None] = [None] * num_slots
        self.block_table = [[NULL_BLOCK] * max_blocks for _ in range(num_slots)]
        self.written: dict[Place, tuple[int, int]] = {}  # place -> (text, token)
        self.draft_written: dict[Place, tuple[int, int]] = {}  # ... -> (text, token), one further
        self.states: SlotStates | None = None
        if world.num_snapshots:
            self.states = SlotStates(num_slots, world.query_len, self._computed)
        self.last_rows: list[PlannedRow] = []
        self.luck = random.Random(0)
        self.num_dead_rows = 0
        self.num_without_place = 0  # drafts that the next step had no place for

    def execute(self, plan: StepPlan, no_writes: set[int], num_places: int) -> StepResult:
        """Run a plan. no_writes: blocks that other requests may read; num_places: drafts that a
        decode has places for"""
        self.query_len = num_places + 1
        last, self.last_rows = self.last_rows, plan.rows
        assert plan.same_rows == (list(map(_lasting, last)) == list(map(_lasting, plan.rows))), (
            "the plan is wrong about its rows"
        )
        if self.states is not None:
            self.states.save_ended(plan.copies)
        self._stage(plan)
        self.no_writes = no_writes
        self._zero(plan)
        if self.states is not None:
            self.states.restore(plan)
        live = [row for row in plan.rows if not self.ended(row.slot)]
        self.num_dead_rows += len(plan.rows) - len(live)
        contexts = [self.num_computed[row.slot] for row in live]
        counts = [self._num_live(row) for row in live]
        self._write_all(live)
        for row in live:  # a layer stores every row's KV before it attends to any
            self._check_reads(row)
        if self.states is not None:
            for row, context, count in zip(live, contexts, counts, strict=True):
                text = self.text(row.slot, drafts=True)[: context + count]
                self.states.run(row, context, text)
        answers = {row.request_id: self._answer(row) for row in live}
        if self.states is not None:
            for row, context in zip(live, contexts, strict=True):
                self.states.commit(row.slot, context)
            self.states.save(plan.copies)
        if plan.num_drafts:
            self._run_drafter(plan.num_drafts, live, contexts, counts)
        dead = RowResult("", -1, [])
        rows = [
            dataclasses.replace(
                answers.get(row.request_id, dead), request_id=row.request_id, epoch=row.epoch
            )
            for row in plan.rows
        ]
        return StepResult(plan.index, rows)

    def ended(self, slot: int) -> bool:
        return self.num_tokens[slot] >= self.token_limit[slot]

    def _stage(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._admit(admission)
        for append in plan.block_appends:
            row = self.block_table[append.slot]
            stop = append.start + len(append.block_ids)
            assert stop <= len(row), "a block append overruns its row"
            row[append.start : stop] = append.block_ids
        for slot in plan.no_drafts:
            self.has_gap[slot] = True

    def _zero(self, plan: StepPlan) -> None:
        """Zeroed blocks hold no text: all that requests get in this step, and no others."""
        blocks = plan.blocks_to_zero
        assert len(set(blocks)) == len(blocks), "a block is zeroed twice"
        assert not self.no_writes & set(blocks), "a block that others may read is zeroed"
        cached = {each.slot: each.num_computed // self.block_size for each in plan.admissions}
        given = [
            block for a in plan.block_appends for block in a.block_ids[cached.get(a.slot, 0) :]
        ]
        assert sorted(blocks) == sorted(given), "other blocks are zeroed than requests get"
        zeroed = set(blocks)
        for texts in (self.written, self.draft_written):
            for place in [place for place in texts if place[0] in zeroed]:
                del texts[place]

    def _admit(self, admission: Admission) -> None:
        slot, tokens = admission.slot, admission.token_ids
        assert len(tokens) < len(self.token_ids[slot]), "no room for an answer"
        self.token_ids[slot][: len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.num_computed[slot] = admission.num_computed
        self.num_drafts[slot] = 0
        self.has_gap[slot] = False
        self.draft_limit[slot] = admission.rules.num_drafts
        limit = admission.num_prompt_tokens + admission.rules.max_tokens
        self.token_limit[slot] = min(limit, self.world.max_model_len)
        assert admission.token_limit == self.token_limit[slot], "a wrong token limit"
        self.admissions[slot] = admission

    def text(self, slot: int, drafts: bool = False) -> list[int]:
        count = self.num_tokens[slot] + (self.num_drafts[slot] if drafts else 0)
        return self.token_ids[slot][:count]

    def _computed(self, slot: int) -> list[int]:
        return self.token_ids[slot][: self.num_computed[slot]]

    def _place(self, slot: int, position: int) -> Place:
        block = self.block_table[slot][position // self.block_size]
        return block, position % self.block_size

    def _num_live(self, row: PlannedRow) -> int:
        slot = row.slot
        known = self.num_tokens[slot] + self.num_drafts[slot]
        return min(row.num_tokens, known - self.num_computed[slot])

    def _claim(self, row: PlannedRow, position: int, places: set[Place]) -> Place:
        """A place that a row writes; no other row may write it in the same phase."""
        # Entries of its block table past that are left from a former holder.
        assert position < row.num_reserved, "a row writes past its reserved blocks"
        place = self._place(row.slot, position)
        assert place[0] != NULL_BLOCK, "a live row writes the null block"
        assert place[0] not in self.no_writes, "a block that others may read is written"
        assert place not in places, "two rows write one place"
        places.add(place)
        return place

    def _write_all(self, rows: list[PlannedRow]) -> None:
        places: set[Place] = set()
        for row in rows:
            start, known = self.num_computed[row.slot], self.num_tokens[row.slot]
            decodes = known - start == 1 and start >= row.num_prompt_tokens
            assert row.num_computed >= start, "the host's bound of what is computed is too low"
            assert decodes or row.num_computed == start, "a chunk is not where the host thinks"
            decodes &= row.num_tokens == self.query_len  # one just resumed may have less
            assert decodes == row.decodes, "host and device disagree on which rows decode"
            dead = row.num_tokens - self._num_live(row)
            assert not dead or row.decodes, "a row computes unknown tokens"
            text = self.text(row.slot, drafts=True)
            keys = text_keys(text)
            for position in range(start, start + self._num_live(row)):
                place = self._claim(row, position, places)
                self.written[place] = (keys[position], text[position])
                self.draft_written[place] = REJECTED  # until the drafter follows

    def _check_reads(self, row: PlannedRow) -> None:
        keys = text_keys(self.text(row.slot, drafts=True))
        length = self.num_computed[row.slot] + self._num_live(row)
        assert length <= row.seq_len, "the host's bound is too low"
        for position in range(length):
            found = self.written.get(self._place(row.slot, position))
            assert found is not None, f"{row.request_id} reads KV that was never written"
            assert found[0] == keys[position], f"{row.request_id} reads another text's KV"

    def _answer(self, row: PlannedRow) -> RowResult:
        slot, live = row.slot, self._num_live(row)
        samples = self.num_computed[slot] + live >= self.num_tokens[slot]
        assert samples == row.samples, "host and device disagree on which rows sample"
        if not samples:
            self.num_computed[slot] += row.num_tokens
            return RowResult(row.request_id, row.epoch, [])
        verified = self.num_computed[slot] + live - self.num_tokens[slot]
        fits = min(self.num_drafts[slot], self.query_len - 1)
        assert verified == fits, "a draft has no place in the step"
        self.num_without_place += self.num_drafts[slot] - verified
        known, text = self.num_tokens[slot], self.text(slot)
        drafts = self.token_ids[slot][known : known + verified]
        while True:
            text.append(next_token(text))
            accepted = len(text) - known
            if accepted > verified or drafts[accepted - 1] != text[-1]:
                break
        self.token_ids[slot][: len(text)] = text
        self.num_tokens[slot] = len(text)
        self.num_computed[slot] = len(text) - 1
        self.num_drafts[slot] = 0
        if self._stops(slot, known):
            self.token_limit[slot] = 0
        return RowResult(row.request_id, row.epoch, text[known:], num_drafts=verified)

    def _stops(self, slot: int, known: int) -> bool:
        """Whether a stop token is among the accepted tokens; tokens after it are accepted too."""
        admission = self.admissions[slot]
        assert admission is not None
        rules, text = admission.rules, self.text(slot)
        first = max(known, admission.num_prompt_tokens + rules.params.min_tokens)
        return any(token in rules.stop_ids for token in text[first:])

    # ---- the drafter ----

    def _run_drafter(
        self, num_drafts: int, rows: list[PlannedRow], contexts: list[int], live: list[int]
    ) -> None:
        """Without KV it makes as many drafts as requests want; the next step takes some."""
        # What the real one computes after a gap is used by no one, as if it were not there.
        able = [
            each
            for each in zip(rows, contexts, live, strict=True)
            if not self.has_gap[each[0].slot]
        ]
        if self.world.drafter_has_kv:
            self._draft_prefill(able)
        else:
            num_drafts = self.world.num_drafts
        places: set[Place] = set()
        for row, _, _ in able:
            self._draft(row, num_drafts, places)

    def _draft_prefill(self, rows: list[tuple[PlannedRow, int, int]]) -> None:
        """Over the step's positions, each with the token that follows it.

        rows: with what was computed before, and how many of their tokens are live
        """
        places: set[Place] = set()
        for row, start, count in rows:
            text = self.text(row.slot)
            keys = text_keys(text)
            for position in range(start, start + count):
                place = self._claim(row, position, places)
                known = position + 1 < len(text)
                value = (keys[position + 1], text[position + 1]) if known else REJECTED
                self.draft_written[place] = value
        for row, start, count in rows:
            text = self.text(row.slot)
            keys = text_keys(text)
            for position in range(min(start + count, len(text) - 1)):
                found = self.draft_written.get(self._place(row.slot, position))
                assert found is not None, f"{row.request_id} drafts from KV that was never written"
                assert found[0] == keys[position + 1], f"{row.request_id} drafts from another text"

    def _draft(self, row: PlannedRow, num_drafts: int, places: set[Place]) -> None:
        """Draft tokens after the known ones, and write the drafter's KV of all but the last."""
        slot, known = row.slot, self.num_tokens[row.slot]
        room = min(num_drafts, self.draft_limit[slot], self.token_limit[slot] - 1 - known)
        for number in range(room if row.samples else 0):
            if number and self.world.drafter_has_kv:
                place = self._claim(row, known - 2 + number, places)
                self.draft_written[place] = REJECTED
            right = self.luck.random() < 0.7
            draft = next_token(self.text(slot, drafts=True)) if right else STOP
            self.token_ids[slot][known + number] = draft
            self.num_drafts[slot] += 1
