"""Prompt lookup: drafts out of the text itself, found on the device."""

from stoop.graph.buffers import Buffer
from stoop.graph.phases import Phase
from stoop.ops.drafting import draft_room, look_up_ngrams
from stoop.spec.base import DraftSetup, Pass


class NgramSpeculator:
    """No weights and no state: one phase."""

    def __init__(self, setup: DraftSetup) -> None:
        spec = setup.config.spec
        assert spec is not None
        self.setup = setup
        self.num_drafts = spec.num_drafts
        self.sizes = (spec.prompt_lookup_min, spec.prompt_lookup_max)
        self.max_model_len = setup.config.schedule.max_model_len

    def phases(self) -> list[Phase]:
        reads = {"row_slots", "samples", "token_ids", "num_tokens", "draft_limit", "token_limit"}
        writes = {"token_ids", "num_drafts"}
        return [Phase("N", self.look_up, reads, writes, drafts=1)]

    def buffers(self) -> list[Buffer]:
        return []

    def look_up(self, run: Pass) -> None:
        slots, step = self.setup.slots, self.setup.buffers.step
        room = draft_room(slots, step, self.max_model_len)
        look_up_ngrams(slots, step, room, self.sizes, self.num_drafts)
