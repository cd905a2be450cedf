"""Bugs in the plans that the host makes for FlashInfer's draft decodes."""

from collections.abc import Callable
from typing import Any

from stoop.attention.flashinfer import FlashInferBackend
from stoop.batch.input_batch import InputBatch
from stoop.check.mutants.base import Replaces, draft_mutant


def skip_the_plan(of_drafts: bool) -> Callable[[Replaces], None]:
    """A graph is replayed by the plan of its capture."""

    def apply(patch: Replaces) -> None:
        plan = FlashInferBackend._plan

        def stale(self: FlashInferBackend, batch: InputBatch, wrappers: Any, length: Any) -> None:
            skipped = self.setup.device_lengths == of_drafts
            if not skipped or length is None or not batch.num_reqs:
                plan(self, batch, wrappers, length)

        patch.setattr(FlashInferBackend, "_plan", stale)

    return apply


def leave_before_last_unpadded(patch: Replaces) -> None:
    """Rows of padding keep what a larger batch left."""
    plan = FlashInferBackend._plan

    def unpadded(self: FlashInferBackend, batch: InputBatch, *args: Any) -> None:
        tail = self.before_last[batch.num_reqs :].clone()
        plan(self, batch, *args)
        if batch.num_reqs:
            self.before_last[batch.num_reqs :] = tail

    patch.setattr(FlashInferBackend, "_plan", unpadded)


MUTANTS = (
    draft_mutant(
        "plan of draft decodes not refreshed",
        skip_the_plan(of_drafts=True),
        "full",
        "flashinfer",
        "draft query_indptr",
        mechanism=2,
        report=38311,
    ),
    draft_mutant(
        "plan of draft decodes not refreshed",
        skip_the_plan(of_drafts=True),
        "step",
        "flashinfer",
        "draft query_indptr",
        mechanism=2,
        report=38311,
    ),
    draft_mutant(
        "padding of draft decodes not planned",
        leave_before_last_unpadded,
        "full",
        "flashinfer",
        "draft before_last",
        mechanism=3,
        report=39773,
    ),
)
