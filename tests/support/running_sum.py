"""A toy family with recurrent state: a Llama whose layers also keep a decaying sum of their stream.

It tests how the engine handles state: it needs everything that a real recurrent layer needs. A
decode step writes its tokens to a log and leaves the sum alone. The next step first adds the tokens
that were accepted, and only those, so that rejected drafts leave no trace.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from stoop.core.state import RecurrentState, TensorSpec
from stoop.layers.attention import Attention
from stoop.layers.stateful import ForwardContext, StatefulLayer
from stoop.layers.weights import WeightView, empty_parameter, prefixed, vector_view
from stoop.model_state.base import ModelStateSetup
from stoop.model_state.mamba_hybrid import MambaHybridModelState
from stoop.models.decoder import DecoderLayer, DecoderModel, DecoderSpec
from stoop.models.family import Family
from stoop.models.llama import read_spec
from stoop.ops.library import register
from stoop.ops.recurrent import RecurrentRows, live_rows
from stoop.ops.rope import Rotation

DECAY = 0.75


class RunningSum(StatefulLayer):
    """y_t = x_t + DECAY * y_{t-1}, over a request's whole text."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = empty_parameter(size)

    @property
    def state(self) -> RecurrentState:
        vector = TensorSpec((self.size,), "float64")
        return RecurrentState(tensors={"total": vector}, per_draft={"log": vector})

    def core(self, state: dict[str, Tensor], rows: RecurrentRows, x: Tensor) -> Tensor:
        out = self.empty_output(x)
        running_sum(
            *(x, rows.query_start_loc, rows.context_lens, rows.seq_lens, rows.slots, rows.pending),
            *(state["total"], state["log"], out),
        )
        return out

    def empty_output(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def weight_views(self) -> Iterator[WeightView]:
        yield vector_view("weight", self.weight)


@register(
    "running_sum(Tensor x, Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, "
    "Tensor slots, Tensor pending, Tensor(a!) total, Tensor(b!) log, Tensor(c!) out) -> ()"
)
def running_sum(x: Tensor, *rest: Tensor) -> None:
    """Row by row. Padding and dead tokens read and write nothing."""
    *rows, total, log, out = rest
    out.zero_()
    for row in live_rows(rows, log_len=log.shape[1]):
        slot = row.slot
        y = torch.zeros_like(total[0])
        if not row.fresh:
            y = total[slot].clone()
            for confirmed in log[slot, : row.pending]:
                y = confirmed + DECAY * y
        if row.logs:
            total[slot] = y
            log[slot, : row.count] = x[row.tokens]
        for place in range(row.begin, row.begin + row.count):
            y = x[place].to(y.dtype) + DECAY * y
            out[place] = y.to(out.dtype)
        if not row.logs:
            total[slot] = y


class SummingLayer(DecoderLayer):
    """A decoder layer, then the running sum of its stream."""

    def __init__(self, spec: DecoderSpec, window: int | None = None) -> None:
        super().__init__(spec, window)
        self.running = RunningSum(spec.hidden_size)

    def forward(
        self, stream: Tensor, rotation: Rotation, ctx: ForwardContext, keep: bool = False
    ) -> Tensor:
        stream = super().forward(stream, rotation, ctx, keep)
        return stream + self.running.weight * ctx.run(self.running, stream)

    def weight_views(self) -> Iterator[WeightView]:
        yield from super().weight_views()
        yield from prefixed("running", self.running.weight_views())


class RunningSumModel(DecoderModel):
    layer_class = SummingLayer

    def make_model_state(self, setup: ModelStateSetup) -> MambaHybridModelState:
        return MambaHybridModelState(setup)


ARCHITECTURE = "RunningSumForCausalLM"
FAMILY = Family(architectures=(ARCHITECTURE,), read_spec=read_spec, build=RunningSumModel)


# ---- a checkpoint, and the model written out without any state ----

SIZES = {
    "vocab_size": 128,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float64",
}


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Random weights, large enough that greedy tokens wander."""
    spec = read_spec(SIZES, ARCHITECTURE)
    with torch.device("meta"):
        model = RunningSumModel(spec)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        view.name: torch.randn(view.shape, dtype=torch.float64, generator=generator)
        * (0.5 if len(view.shape) == 1 else 0.4)
        for view in model.weight_views()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = SIZES | {"architectures": [ARCHITECTURE], "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class WholeContext:
    """Runs layers over a whole text at once: nothing is kept, so nothing can go wrong with it."""

    def run(self, layer: StatefulLayer, *inputs: Any) -> Tensor:
        if isinstance(layer, RunningSum):
            (x,) = inputs
            sums = [x[0]]
            for token in x[1:]:
                sums.append(token + DECAY * sums[-1])
            return torch.stack(sums)
        assert isinstance(layer, Attention)
        q, k, v = (t.transpose(0, 1)[None] for t in layer.rotated(*inputs))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=layer.shape.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


@torch.inference_mode()
def greedy_by_recomputing(
    model: RunningSumModel, prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """Greedy tokens, each from a pass over the whole text so far."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
        hidden, _ = model(ids, positions, WholeContext())
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
