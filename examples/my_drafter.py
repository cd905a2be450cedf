"""A drafter outside of stoop: import this module, then name it in the speculative configuration.

    import my_drafter, stoop
    llm = stoop.LLM(..., speculative_config={"method": "repeat", "num_speculative_tokens": 3})

"Repeat" drafts that the newest token comes again, K times. That is seldom right, and it does not
matter: drafts change how fast an answer comes, never which answer comes.

A drafter gives one or more phases. A phase is a function over buffers that keep their address, with
static shapes and no decision on the host, so that it runs inside a CUDA graph as it does outside.
"""

import torch

import stoop
from stoop.graph.buffers import Buffer
from stoop.graph.phases import Phase
from stoop.ops.drafting import commit_draft, draft_room
from stoop.spec.base import DraftSetup, Pass


class RepeatSpeculator:
    def __init__(self, setup: DraftSetup) -> None:
        assert setup.config.spec is not None
        self.setup = setup
        self.num_drafts = setup.config.spec.num_drafts
        self.max_model_len = setup.config.schedule.max_model_len

    def phases(self) -> list[Phase]:
        """`reads` and `writes` name the buffers that the phase touches: a name that is no buffer,
        or that is read before any phase writes it, is refused at the start."""
        reads = {"row_slots", "samples", "token_ids", "num_tokens", "num_drafts"}
        limits = {"draft_limit", "token_limit"}
        writes = {"token_ids", "num_drafts"}
        return [Phase("R", self.repeat, reads | limits, writes, drafts=1, title="repeat")]

    def buffers(self) -> list[Buffer]:
        """None of its own: drafts go into the requests' slots."""
        return []

    def repeat(self, run: Pass) -> None:
        slots, step = self.setup.slots, self.setup.buffers.step
        room = draft_room(slots, step, self.max_model_len)  # [max_reqs]: drafts each row may have
        newest = (slots.num_tokens[step.row_slots] - 1).clamp(min=0)
        token_ids = slots.token_ids[step.row_slots, newest].to(torch.int64)
        for _ in range(self.num_drafts):
            commit_draft(slots, step, room, token_ids)


stoop.register_drafter("repeat", RepeatSpeculator)
