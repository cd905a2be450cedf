"""Sampling parameters by slot, on the device, written once at admission."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.batch.staging import StagedWrites
from stoop.core.request import TokenRules
from stoop.core.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
)
from stoop.ops.inputs import StopTensors
from stoop.ops.sampling import DrawTensors

# A word is stored twice: as it is and with a space before it.
_BAD_WORD_ROWS = 2 * MAX_BAD_WORDS
_STOP_WIDTH = 2 * MAX_STOP_IDS  # the user's and the model's own


@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters; the last row is that of the sink."""

    temperature: Tensor  # [slots + 1] float32
    top_k: Tensor  # [slots + 1] int64
    top_p: Tensor  # [slots + 1] float32
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seeds: Tensor  # [slots + 1] int64
    min_tokens: Tensor  # [slots + 1] int64
    stop_counts: Tensor  # [slots + 1] int64
    stop_ids: Tensor  # [slots + 1, width] int64; the first stop_counts are valid
    bias_counts: Tensor
    bias_ids: Tensor
    bias_values: Tensor  # float32
    bad_word_counts: Tensor
    bad_words: Tensor  # [slots + 1, words, length] int64, aligned right, padded with -1

    @property
    def stops(self) -> StopTensors:
        return StopTensors(self.min_tokens, self.stop_counts, self.stop_ids)

    @property
    def draw(self) -> DrawTensors:
        return DrawTensors(self.temperature, self.seeds, self.min_p, self.top_k, self.top_p)

    @staticmethod
    def make(num_slots: int, device: torch.device) -> "SamplingState":
        rows = num_slots + 1

        def ints(*width: int) -> Tensor:
            return torch.zeros(rows, *width, dtype=torch.int64, device=device)

        def floats(fill: float, *width: int) -> Tensor:
            return torch.full((rows, *width), fill, dtype=torch.float32, device=device)

        return SamplingState(
            temperature=floats(0.0),
            top_k=ints(),
            top_p=floats(1.0),
            min_p=floats(0.0),
            repetition=floats(1.0),
            presence=floats(0.0),
            frequency=floats(0.0),
            seeds=ints(),
            min_tokens=ints(),
            stop_counts=ints(),
            stop_ids=ints(_STOP_WIDTH),
            bias_counts=ints(),
            bias_ids=ints(MAX_LOGIT_BIAS),
            bias_values=floats(0.0, MAX_LOGIT_BIAS),
            bad_word_counts=ints(),
            bad_words=ints(_BAD_WORD_ROWS, MAX_BAD_WORD_TOKENS),
        )

    def admit(self, staged: StagedWrites, slot: int, rules: TokenRules) -> None:
        """Write every parameter of a slot, so that nothing of its previous request is left.

        What lies beyond a count is never read.
        """
        params = rules.params
        # Filters would only break ties of a greedy row.
        greedy = params.greedy
        staged.put(self.temperature, slot, 0.0 if greedy else params.temperature)
        staged.put(self.top_k, slot, 0 if greedy else params.top_k)
        staged.put(self.top_p, slot, 1.0 if greedy else params.top_p)
        staged.put(self.min_p, slot, 0.0 if greedy else params.min_p)
        staged.put(self.repetition, slot, params.repetition_penalty)
        staged.put(self.presence, slot, params.presence_penalty)
        staged.put(self.frequency, slot, params.frequency_penalty)
        staged.put(self.seeds, slot, rules.seed)
        staged.put(self.min_tokens, slot, params.min_tokens)
        stops = sorted(rules.stop_ids)
        staged.put(self.stop_counts, slot, len(stops))
        staged.put(self.stop_ids, slot, stops)
        bias = params.logit_bias or {}
        staged.put(self.bias_counts, slot, len(bias))
        staged.put(self.bias_ids, slot, list(bias))
        staged.put(self.bias_values, slot, list(bias.values()))
        words = []
        for word in rules.bad_words:
            words += [-1] * (MAX_BAD_WORD_TOKENS - len(word)) + list(word)
        staged.put(self.bad_word_counts, slot, len(rules.bad_words))
        staged.put(self.bad_words, slot, words)
