"""A toy family with recurrent state: a Llama whose layers also keep a decaying sum of their stream.

It tests how the engine handles state: it needs everything that a real recurrent layer needs. A
decode step writes its tokens to a log and leaves the sum alone. The next step first adds the tokens
that were accepted, and only those, so that rejected drafts leave no trace.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.batch.staging import StagedWrites
from stoop.core.state import RecurrentState, TensorSpec
from stoop.core.step import Admission
from stoop.graph.buffers import Buffer, Extent, Lifetime
from stoop.layers.attention import Attention
from stoop.layers.stateful import ForwardContext, StatefulLayer
from stoop.layers.weights import WeightView, empty_parameter, prefixed, vector_view
from stoop.model_state.base import Metadata, ModelStateSetup
from stoop.model_state.default import DefaultModelState
from stoop.models.decoder import DecoderLayer, DecoderModel, DecoderSpec
from stoop.models.family import Family
from stoop.models.llama import read_spec
from stoop.ops.library import register
from stoop.ops.rope import Rotation

DECAY = 0.75


@dataclass(frozen=True)
class RecurrentMetadata:
    """What recurrent layers read of one step."""

    query_start_loc: Tensor  # [num_reqs + 1] int32
    context_lens: Tensor  # [num_reqs] int32
    seq_lens: Tensor  # [num_reqs] int32
    row_slots: Tensor  # [num_reqs] int64
    pending: Tensor  # [slots + 1] int64: tokens of the log that count


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

    def core(self, state: dict[str, Tensor], metadata: RecurrentMetadata, x: Tensor) -> Tensor:
        out = self.empty_output(x)
        running_sum(
            x,
            metadata.query_start_loc,
            metadata.context_lens,
            metadata.seq_lens,
            metadata.row_slots,
            metadata.pending,
            state["total"],
            state["log"],
            out,
        )
        return out

    def empty_output(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def weight_views(self) -> Iterator[WeightView]:
        yield vector_view("weight", self.weight)


@register(
    "running_sum(Tensor x, Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, "
    "Tensor row_slots, Tensor pending, Tensor(a!) total, Tensor(b!) log, Tensor(c!) out) -> ()"
)
def running_sum(
    x: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    pending: Tensor,
    total: Tensor,
    log: Tensor,
    out: Tensor,
) -> None:
    """Row by row. Padding and dead tokens read and write nothing."""
    starts, contexts, lengths = (t.tolist() for t in (query_start_loc, context_lens, seq_lens))
    out.zero_()
    for row, slot in enumerate(row_slots.tolist()):
        begin, end = starts[row], starts[row + 1]
        num_live = lengths[row] - contexts[row]
        if num_live <= 0:
            continue
        y = torch.zeros_like(total[0])
        if contexts[row]:  # without context nothing in the slot counts
            y = total[slot].clone()
            for confirmed in log[slot, : int(pending[slot])]:
                y = confirmed + DECAY * y
        logs = end - begin <= log.shape[1]
        if logs:
            total[slot] = y
        for place in range(num_live):
            token = x[begin + place].to(y.dtype)
            if logs:
                log[slot, place] = token
            y = token + DECAY * y
            out[begin + place] = y.to(out.dtype)
        if not logs:
            total[slot] = y


class RunningSumState(DefaultModelState):
    """Adds one counter a slot, shared by all layers."""

    def __init__(self, setup: ModelStateSetup) -> None:
        super().__init__(setup)
        slots = setup.slots
        self.pending = torch.zeros_like(slots.num_tokens)
        self.log_len = setup.layout.query_len

    def admit(self, staged: StagedWrites, admission: Admission) -> None:
        staged.put(self.pending, admission.slot, 0)

    def prepare_attn(self, batch: InputBatch, for_capture: bool = False) -> Metadata:
        num_reqs, step = batch.num_reqs_padded, batch.step
        recurrent = RecurrentMetadata(
            query_start_loc=batch.rows.query_start_loc[: num_reqs + 1],
            context_lens=step.context_lens[:num_reqs],
            seq_lens=step.seq_lens[:num_reqs],
            row_slots=step.row_slots[:num_reqs],
            pending=self.pending,
        )
        return {**super().prepare_attn(batch, for_capture), RecurrentState: recurrent}

    def commit(self) -> None:
        """Of a row that was logged, the tokens that are computed for good count."""
        slots, step = self.setup.slots, self.setup.buffers.step
        starts = self.setup.buffers.rows.query_start_loc.long()
        logged = starts[1:] - starts[:-1] <= self.log_len
        confirmed = slots.num_computed[step.row_slots] - step.context_lens
        self.pending[step.row_slots] = torch.where(logged, confirmed, 0)

    def state_buffers(self) -> list[Buffer]:
        pending = Buffer("pending", self.pending, Lifetime.SLOT, Extent.SLOTS)
        return [*super().state_buffers(), pending]


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

    def make_model_state(self, setup: ModelStateSetup) -> RunningSumState:
        return RunningSumState(setup)


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
