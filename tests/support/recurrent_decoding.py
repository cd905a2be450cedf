"""Decode with drafts that are rejected at random: the state has the bits of plain decoding."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.ops.causal_conv import ConvState
from stoop.ops.delta_net import DeltaGates, DeltaState, DeltaWeights
from stoop.ops.recurrent import RecurrentRows
from support.recurrent_cases import DeltaShape, make_gates, make_weights

WIDTH = 4


@dataclass(frozen=True)
class Text:
    """The inputs of a layer at every token of some requests."""

    shape: DeltaShape
    x: Tensor  # [requests, tokens, channels]
    gates: list[Tensor]  # z, b, a: [requests, tokens, ...]
    conv_weight: Tensor
    weights: DeltaWeights

    @property
    def size(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1]


def make_text(
    shape: DeltaShape, requests: int, tokens: int, dtype: torch.dtype, device: str = "cpu"
) -> Text:
    gates = make_gates(shape, requests * tokens, dtype, device)
    return Text(
        shape,
        torch.randn(requests, tokens, shape.channels, device=device).to(dtype),
        [each.unflatten(0, (requests, tokens)) for each in (gates.z, gates.b, gates.a)],
        torch.randn(shape.channels, 1, WIDTH, device=device).to(dtype),
        make_weights(shape, dtype, device),
    )


class Decoder:
    """The state of a layer, and steps of all requests over their texts."""

    def __init__(self, text: Text, log_len: int) -> None:
        self.text, self.log_len = text, log_len
        shape, device, wide = text.shape, text.x.device, torch.float32
        slots = text.size[0] + 1

        def empty(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.full((slots, *size), torch.nan, dtype=dtype, device=device)

        keys, values = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)
        self.conv = ConvState(
            empty(WIDTH - 1, shape.channels, dtype=text.x.dtype),
            empty(log_len, shape.channels, dtype=text.x.dtype),
        )
        self.delta = DeltaState(
            empty(shape.value_heads, shape.key_dim, shape.value_dim, dtype=wide),
            empty(log_len, *keys, dtype=wide),
            empty(log_len, *values, dtype=wide),
            empty(log_len, shape.value_heads, dtype=wide),
        )
        self.pending = torch.zeros(slots, dtype=torch.int64, device=device)

    def step(self, contexts: list[int], counts: list[int], right: list[int]) -> list[Tensor]:
        """Compute `counts` tokens of each request after its context, of which the first `right`
        are those of the text and the rest wrong drafts; returns the outputs of the right ones."""
        from stoop.ops.kernels import causal_conv, delta_net

        device = self.text.x.device
        parts: list[list[Tensor]] = [[], [], [], []]
        for request, (context, count, good) in enumerate(zip(contexts, counts, right, strict=True)):
            for part, whole in zip(parts, (self.text.x, *self.text.gates), strict=True):
                taken = whole[request, context : context + count].clone()
                taken[good:] = taken[good:].flip(-1) * 3
                part.append(taken)
        x, *gates = (torch.cat(part) for part in parts)
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)

        def numbers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        rows = RecurrentRows(
            numbers(starts),
            numbers(contexts),
            numbers([context + count for context, count in zip(contexts, counts, strict=True)]),
            torch.arange(len(contexts), device=device),
            self.pending,
            short=max(counts) <= self.log_len,
        )
        qkv = causal_conv.causal_conv(x, self.text.conv_weight, None, rows, self.conv)
        text = self.text
        out = delta_net.delta_net(qkv, DeltaGates(*gates), text.weights, rows, self.delta)
        for request, good in enumerate(right):
            self.pending[request] = good if counts[request] <= self.log_len else 0
        return [out[start : start + good] for start, good in zip(starts, right, strict=False)]

    @property
    def checkpoints(self) -> list[tuple[Tensor, Tensor]]:
        """Window and matrix of each request, as before its last step's tokens."""
        return [
            (self.conv.window[request].clone(), self.delta.matrix[request].clone())
            for request in range(self.text.size[0])
        ]


def check_decoding(
    text: Text, log_len: int, rng: random.Random, out_limit: float | None = None
) -> None:
    """Drafts of up to log_len tokens a step, against one token a step: states have the same bits.

    out_limit: how much outputs may differ; None: not at all
    """
    requests, tokens = text.size
    plain = Decoder(text, 1)
    states, outputs = [], []
    for context in range(tokens):
        outputs.append(plain.step([context] * requests, [1] * requests, [1] * requests))
        states.append(plain.checkpoints)
    drafted = Decoder(text, log_len)
    contexts = [0] * requests
    while min(contexts) < tokens:
        # Those that are done repeat their last token, and do not count.
        live = [min(context, tokens - 1) for context in contexts]
        most = [min(log_len, tokens - context) for context in live]
        counts = [rng.randint(1, limit) for limit in most]
        right = [rng.randint(1, count) for count in counts]
        out = drafted.step(live, counts, right)
        for request, context in enumerate(contexts):
            if context == tokens:
                continue
            found, expected = drafted.checkpoints[request], states[context][request]
            assert torch.equal(found[0], expected[0]), (request, context)
            assert torch.equal(found[1], expected[1]), (request, context)
            for index in range(right[request]):
                expected_out = outputs[context + index][request][0]
                where = (request, context, index)
                if out_limit is None:
                    assert torch.equal(out[request][index], expected_out), where
                else:
                    limit = {"rtol": out_limit, "atol": out_limit}
                    torch.testing.assert_close(out[request][index], expected_out, **limit)
            contexts[request] += right[request]
            if contexts[request] == tokens:
                drafted.pending[request] = 0
