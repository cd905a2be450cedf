"""Bugs put back into the masks, one at a time: each must be caught as the table in
docs/speculation.md says."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoop import LLM
from stoop.batch.input_batch import InputBatch
from stoop.check.mutants.base import Mutant, Patch, applied
from stoop.core.step import Admission, PlannedRow, RowResult
from stoop.grammar.filling import MaskFiller
from stoop.grammar.filling import Path as DraftPath
from stoop.grammar.masks import GrammarMasks
from stoop.graph.sanitizer import SanitizerError
from stoop.ops import verification
from stoop.sampling.sampler import Sampler
from support.grammars import make_grammar_llm, schema_params, tell
from support.mutants import documented_rows, rows

COUNT = 14
Fill = Callable[[GrammarMasks, InputBatch], None]


def after_fill(patch: Patch, change: Callable[[GrammarMasks, InputBatch, Tensor], None]) -> None:
    """Change the masks that the host has written. change: its last argument is the rows before"""
    fill: Fill = GrammarMasks.fill

    def changed(self: GrammarMasks, batch: InputBatch) -> None:
        before = self._device.rows.clone()
        fill(self, batch)
        change(self, batch, before)

    patch.setattr(GrammarMasks, "fill", changed)


def one_position_late(patch: Patch) -> None:
    """The mask after draft j is that after draft j - 1."""

    def late(masks: GrammarMasks, batch: InputBatch, before: Tensor) -> None:
        masks._device.rows[:, 1:] = masks._device.rows[:, :-1].clone()

    after_fill(patch, late)


def advanced_by_drafts(patch: Patch) -> None:
    """The grammar takes in the drafts, accepted or not."""
    advance = GrammarMasks.advance

    def by_drafts(
        self: GrammarMasks, planned: Sequence[PlannedRow], results: Sequence[RowResult]
    ) -> None:
        drafted = []
        for row, each in zip(planned, results, strict=True):
            tried = self._tried.get(row.slot, [])  # type: ignore[attr-defined]
            drafted.append(RowResult(each.request_id, each.epoch, tried + each.token_ids[-1:]))
        advance(self, planned, drafted)

    read = GrammarMasks._read_drafts

    def remembered(self: GrammarMasks, planned: Sequence[PlannedRow]) -> dict[int, list[int]]:
        self._tried = read(self, planned)  # type: ignore[attr-defined]
        return self._tried  # type: ignore[attr-defined]

    patch.setattr(GrammarMasks, "_read_drafts", remembered)
    patch.setattr(GrammarMasks, "advance", by_drafts)


def not_rolled_back(patch: Patch) -> None:
    """Drafts stay in the grammar after their masks are filled."""
    fill = MaskFiller.fill

    def kept(self: MaskFiller, paths: Sequence[DraftPath], bits: Tensor) -> Any:
        every, count = fill(self, paths, bits)
        for (follower, drafts), found in zip(paths, every, strict=True):
            for draft in drafts[: len(found) - 1]:
                follower.take(draft)
        return every, count

    patch.setattr(MaskFiller, "fill", kept)


def of_another_request(patch: Patch) -> None:
    """Each row has the masks of the row before it."""

    def rolled(masks: GrammarMasks, batch: InputBatch, before: Tensor) -> None:
        live = masks._device.rows[: batch.num_reqs]
        live.copy_(live.roll(1, 0))

    after_fill(patch, rolled)


def first_position_only(patch: Patch) -> None:
    """Positions after drafts have no mask: a forbidden draft may be accepted."""
    mask = Sampler.mask_

    def first(self: Sampler, logits: Tensor, num_reqs: int) -> None:
        kept = logits.clone()
        mask(self, logits, num_reqs)
        shape = (num_reqs, logits.shape[0] // num_reqs, -1)
        logits.view(shape)[:, 1:] = kept.view(shape)[:, 1:]

    patch.setattr(Sampler, "mask_", first)


def every_draft_accepted(patch: Patch) -> None:
    """Drafts are accepted without a look at what the masked logits choose."""
    write = verification.write_verdict

    def accepting(chosen: Tensor, accepts: Tensor | None, *rest: Any) -> None:
        if chosen.shape[1] > 1:
            accepts = torch.ones(chosen.shape[0], chosen.shape[1] - 1, dtype=torch.bool)
        write(chosen, accepts, *rest)

    patch.setattr(verification, "write_verdict", accepting)


def stale_drafts(patch: Patch) -> None:
    """The host has the drafts of its first step with a grammar, and never others."""
    send = GrammarMasks.send_drafts

    def once(self: GrammarMasks, planned: Sequence[PlannedRow]) -> None:
        if self._drafts is None:
            send(self, planned)

    patch.setattr(GrammarMasks, "send_drafts", once)


def not_refreshed(patch: Patch) -> None:
    """The host writes no masks in decode steps: replays read those of an earlier step."""
    fill: Fill = GrammarMasks.fill

    def for_prompts(self: GrammarMasks, batch: InputBatch) -> None:
        if not all(row.decodes for row in batch.plan_rows):
            fill(self, batch)

    patch.setattr(GrammarMasks, "fill", for_prompts)


def rows_unpadded(patch: Patch) -> None:
    """Rows past the batch keep what an earlier step wrote there."""

    def keep(masks: GrammarMasks, batch: InputBatch, before: Tensor) -> None:
        masks._device.rows[batch.num_reqs :] = before[batch.num_reqs :]

    after_fill(patch, keep)


def not_followed_again(patch: Patch) -> None:
    """After a preemption the grammar starts from its beginning."""
    admit = GrammarMasks.admit

    def forgetful(self: GrammarMasks, admission: Admission) -> None:
        prompt = admission.token_ids[: admission.num_prompt_tokens]
        admit(self, Admission(**{**vars(admission), "token_ids": prompt}))

    patch.setattr(GrammarMasks, "admit", forgetful)


def mutant(name: str, apply: Callable[[Patch], None], **caught: Any) -> Mutant:
    return Mutant(name, apply, "step", num_drafts=3, **{"by_sanitizer": False} | caught)


MUTANTS = (
    mutant("masks one position late", one_position_late),
    mutant("a grammar advanced by drafts", advanced_by_drafts),
    mutant("drafts not rolled back", not_rolled_back),
    mutant("masks of another request", of_another_request),
    mutant("only the first position masked", first_position_only),
    mutant("every draft accepted", every_draft_accepted),
    mutant("stale drafts on the host", stale_drafts),
    mutant("masks not refreshed", not_refreshed, buffer="mask_bits", by_sanitizer=True),
    mutant(
        "mask rows unpadded",
        rows_unpadded,
        buffer="mask_rows",
        by_sanitizer=True,
        by_equality=False,
    ),
    mutant("a preempted request starts again", not_followed_again),
)


def make(model: Path, **options: Any) -> LLM:
    """Few blocks: some requests are preempted."""
    return make_grammar_llm(model, num_kv_blocks=24, **options)


def run(llm: LLM, wanted: list[list[int]] | None = None) -> list[list[int]]:
    source = random.Random(5)
    prompts = [[name, *(source.randrange(256) for _ in range(20 + name))] for name in range(COUNT)]
    if wanted is not None:
        tell(prompts, wanted, 0.3)
    _, params = schema_params(COUNT, 21)
    for each in params:  # before the first step, so that every run has the same batches
        if each.structured_outputs is not None:
            llm.engine.runner.grammars.store.get(each.structured_outputs)
    params[1::3] = [each.replace(temperature=1.0, seed=2) for each in params[1::3]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    return run(make(model))


def outcome(model: Path, wanted: list[list[int]], sanitize: bool) -> Exception | bool:
    """An error, or whether the answers are other than those of plain, eager decoding."""
    spec = {"method": "oracle", "num_speculative_tokens": 3}
    llm = make(
        model,
        speculative_config=spec,
        graph_mode="step",
        capture_sizes="8",
        capture_structured=True,
        sanitize=sanitize,
    )
    try:
        answers = run(llm, wanted)
    except Exception as error:
        return error
    assert llm.metrics()["num_preemptions"] > 0 or answers != wanted
    return answers != wanted


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, model: Path, wanted: list[list[int]]) -> None:
    with applied(mutant):
        plain = outcome(model, wanted, sanitize=False)
        watched = outcome(model, wanted, sanitize=True)
    for found in (plain, watched):
        assert not isinstance(found, (TypeError, AttributeError, NameError)), found
    assert bool(plain) == mutant.by_equality, plain
    assert isinstance(watched, SanitizerError) == mutant.by_sanitizer, watched
    assert getattr(watched, "buffer", None) == mutant.buffer, watched


@pytest.mark.parametrize("sanitize", [False, True])
def test_without_mutants_nothing_is_caught(
    model: Path, wanted: list[list[int]], sanitize: bool
) -> None:
    assert outcome(model, wanted, sanitize) is False


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text()
    assert documented_rows(text, "| mutant | answers differ | sanitizer |") == rows(MUTANTS)
