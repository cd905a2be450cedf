"""What a drafter gets, and what it gives: phases."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stoop.batch.input_batch import InputBatch, InputBuffers
from stoop.config.schema import Config
from stoop.graph.buffers import Buffer
from stoop.graph.phases import Phase
from stoop.layers.stateful import ForwardContext
from stoop.model_state.base import ModelState
from stoop.ops.inputs import SlotTensors
from stoop.sampling.sampler import SamplingNeeds
from stoop.sampling.state import SamplingState


@dataclass(frozen=True)
class DraftSetup:
    """What a drafter shares with the target: state and buffers, by identity."""

    config: Config
    slots: SlotTensors
    buffers: InputBuffers
    sampling: SamplingState
    model_state: ModelState  # the target's
    draft_state: ModelState  # the same states, with metadata of their own for draft decodes
    hidden: Tensor  # [max_tokens, hidden_size]: the target's normalised states
    taps: Tensor | None  # [max_tokens, num_taps, hidden_size]
    draft_logits: Tensor | None  # [slots + 1, K, vocab_size] float32: what drafts are drawn from


@dataclass(frozen=True)
class Pass:
    """What a phase runs on."""

    batch: InputBatch
    context: ForwardContext
    needs: SamplingNeeds
    worst_case: bool  # in a graph, or its twin: bounds are the most that the graph must serve
    num_drafts: int  # that the step makes, at most


class Speculator(Protocol):
    """A drafter: puts drafts after each row's known tokens, into slot state."""

    def phases(self) -> list[Phase]:
        """Its part of a step, which follows the update of slot state."""
        ...

    def buffers(self) -> list[Buffer]:
        """Its persistent buffers, weights included."""
        ...
