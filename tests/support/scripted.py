"""A drafter that follows a script: right, wrong or silent by turns, so that steps accept any number
of drafts.

It knows the whole text of every request by its first token. How many drafts it makes, and which are
wrong, depends on the position alone, so every engine drafts alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import stoop
from stoop.config import speculation
from stoop.graph.buffers import Buffer, Lifetime
from stoop.graph.phases import Phase
from stoop.ops.drafting import commit_draft, draft_room
from stoop.spec import registry
from stoop.spec.base import DraftSetup, Pass

METHOD = "scripted"


class ScriptedSpeculator:
    script: Tensor  # [vocabulary, positions] int64: the text after each first token

    def __init__(self, setup: DraftSetup) -> None:
        assert setup.config.spec is not None
        self.setup = setup
        self.num_drafts = setup.config.spec.num_drafts
        self.max_model_len = setup.config.schedule.max_model_len

    def phases(self) -> list[Phase]:
        reads = {"row_slots", "samples", "token_ids", "num_tokens", "num_drafts", "script"}
        limits = {"draft_limit", "token_limit"}
        return [Phase("S", self.draft, reads | limits, {"token_ids", "num_drafts"}, drafts=1)]

    def buffers(self) -> list[Buffer]:
        return [Buffer("script", self.script, Lifetime.CONSTANT)]

    def draft(self, run: Pass) -> None:
        slots, step = self.setup.slots, self.setup.buffers.step
        first = slots.token_ids[step.row_slots, 0].long()
        known = slots.num_tokens[step.row_slots]
        silent = (known * 5 + first) % (self.num_drafts + 2)
        room = torch.minimum(draft_room(slots, step, self.max_model_len), silent)
        for number in range(self.num_drafts):
            place = (known + number).clamp(max=self.script.shape[1] - 1)
            token_ids = self.script[first, place]
            wrong = (place * 7 + first) % 4 == 0
            commit_draft(slots, step, room, torch.where(wrong, (token_ids + 1) % 97, token_ids))


@contextmanager
def scripted(texts: Sequence[Sequence[int]], vocab_size: int) -> Iterator[None]:
    """Register the drafter for a while. texts: prompts and answers; first tokens differ"""
    assert len({text[0] for text in texts}) == len(texts), "two texts start alike"
    script = torch.zeros(vocab_size, max(map(len, texts)) + 1, dtype=torch.int64)
    for text in texts:
        script[text[0], : len(text)] = torch.tensor(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "SPECULATORS", dict(registry.SPECULATORS))
        patch.setattr(speculation, "_headless", list(speculation._headless))
        patch.setattr(ScriptedSpeculator, "script", script, raising=False)
        stoop.register_drafter(METHOD, ScriptedSpeculator)
        yield


def scripted_config(num_drafts: int) -> dict[str, Any]:
    return {"method": METHOD, "num_speculative_tokens": num_drafts}
