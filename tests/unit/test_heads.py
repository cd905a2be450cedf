"""Draft heads of every layout: what is settled of them, where their tensors go, what is refused."""

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from stoop.attention.base import AttentionShape
from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError, ConfigError
from stoop.config.schema import HeadSpec, ModelSpec, RopeSpec
from stoop.models.eagle import EagleHead
from stoop.models.head_config import canonical_names, read_head_spec
from stoop.models.head_loader import load_head
from stoop.models.llama import LlamaModel
from stoop.models.loader import build, fill_dummy
from stoop.ops.rope import HeadNorms, Rotation
from stoop.ops.rope import rotate as turn_heads

VOCAB, DRAFT, SIZE, MLP, HEADS, KV, DIM, EPS = 40, 24, 32, 48, 4, 2, 8, 1e-5
THETA = 5000.0
TAPS = "eagle_aux_hidden_state_layer_ids"

TARGET = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=SIZE,
    intermediate_size=MLP,
    num_layers=6,
    num_heads=HEADS,
    num_kv_heads=KV,
    head_dim=DIM,
    rms_norm_eps=EPS,
    max_position=128,
    rope=RopeSpec(10000.0),
    dtype="float32",
)
DECODER = dataclasses.replace(
    TARGET, num_layers=1, max_position=64, rope=RopeSpec(THETA), windows=(None,)
)
EAGLE1 = HeadSpec("eagle", DECODER, SIZE, VOCAB, own_lm_head=False)
EAGLE3 = HeadSpec("eagle3", DECODER, SIZE, VOCAB, taps=(2, 3, 3))

LAYER_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 64,
    "rope_theta": THETA,
}

Config = dict[str, Any]
Tensors = dict[str, Tensor]


def flat(name: str = "LlamaForCausalLM", **changes: Any) -> Config:
    return {"architectures": [name], "torch_dtype": "float32", **LAYER_CONFIG, **changes}


def speculators(kind: str, **changes: Any) -> Config:
    top = {"speculators_model_type": kind, "dtype": "float32", "architectures": ["Speculator"]}
    return {**top, "transformer_layer_config": LAYER_CONFIG, **changes}


def layer_tensors(prefix: str, width: int, norms: tuple[str, ...], spec: ModelSpec) -> Config:
    size, qkv = spec.hidden_size, {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM}
    shapes: dict[str, Any] = {
        **{f"self_attn.{name}_proj": (rows, width) for name, rows in qkv.items()},
        "self_attn.o_proj": (size, HEADS * DIM),
        "mlp.gate_proj": (MLP, size),
        "mlp.up_proj": (MLP, size),
        "mlp.down_proj": (size, MLP),
        **dict.fromkeys((*norms, "post_attention_layernorm"), (size,)),
    }
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,)}
    named = {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
    if spec.qkv_bias:
        named |= {f"{prefix}.self_attn.{name}_proj.bias": (rows,) for name, rows in qkv.items()}
    return named


def make_tensors(spec: HeadSpec, seed: int = 0) -> Tensors:
    """Random weights under canonical names, written from the published shapes."""
    size, vocab = spec.decoder.hidden_size, spec.decoder.vocab_size
    eagle3 = spec.method == "eagle3"
    width = len(spec.taps) * SIZE
    shapes: dict[str, Any] = {"fc.weight": (size, width if eagle3 else 2 * size)}
    norms = ("input_layernorm", "hidden_norm") if eagle3 else ()
    shapes |= layer_tensors("layers.0", 2 * size if eagle3 else size, norms, spec.decoder)
    for index in range(1, spec.decoder.num_layers):
        shapes |= layer_tensors(f"layers.{index}", size, ("input_layernorm",), spec.decoder)
    optional: dict[str, tuple[bool, Any]] = {
        "fc.bias": (spec.fc_bias, (size,)),
        "norm.weight": (eagle3, (size,)),
        "lm_head.weight": (spec.own_lm_head, (vocab, size)),
        "embed_tokens.weight": (spec.own_embedding, (VOCAB, size)),
        "input_norm.weight": (spec.norm_before_fc, (width,)),
        **{f"fc_norm.{i}.weight": (spec.fc_norms, (SIZE,)) for i in range(len(spec.taps))},
    }
    shapes |= {name: shape for name, (there, shape) in optional.items() if there}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 0.3 * torch.randn(shape, generator=generator) + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }
    if spec.maps_vocabulary:
        tensors["d2t"] = torch.arange(DRAFT).clamp(max=8)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    return tensors


def keep(name: str) -> str:
    return name


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def under_model(name: str) -> str:
    return name if name.startswith(("lm_head", "d2t", "t2d")) else f"model.{name}"


def aux_norms(name: str) -> str:
    for index, place in enumerate(("low", "mid", "high")):
        name = name.replace(f"fc_norm.{index}.", f"aux_norm_{place}.")
    return midlayer(name)


def fusion(name: str) -> str:
    return name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")


def write(
    folder: Path,
    config: Config,
    tensors: Tensors,
    rename: Callable[[str], str] = keep,
    pickled: bool = False,
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {rename(name): tensor for name, tensor in tensors.items()}
    if pickled:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    return folder


@dataclasses.dataclass(frozen=True)
class Layout:
    config: Config
    spec: HeadSpec
    rename: Callable[[str], str] = keep
    pickled: bool = False


def eagle3(**changes: Any) -> HeadSpec:
    return dataclasses.replace(EAGLE3, **changes)


def decoder(**changes: Any) -> ModelSpec:
    return dataclasses.replace(DECODER, **changes)


QWEN2 = decoder(architecture="Qwen2ForCausalLM", qkv_bias=True)
QWEN3 = decoder(architecture="Qwen3ForCausalLM", qk_norm=True)
DRAFTING = decoder(vocab_size=DRAFT)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

LAYOUTS = {
    "eagle1": Layout(flat(), EAGLE1),
    "eagle1, named, with bias and embedding": Layout(
        flat("EagleLlamaForCausalLM", bias=True),
        dataclasses.replace(EAGLE1, fc_bias=True, own_embedding=True),
        under_model,
    ),
    "eagle1, whose config claims a bias": Layout(
        flat("LlamaForCausalLMEagle", bias=True), EAGLE1, pickled=True
    ),
    "eagle1 with two layers and an lm_head": Layout(
        flat(num_hidden_layers=2),
        dataclasses.replace(
            EAGLE1, own_lm_head=True, decoder=decoder(num_layers=2, windows=(None, None))
        ),
    ),
    "eagle1, tied like its target": Layout(
        flat(tie_word_embeddings=True),
        dataclasses.replace(EAGLE1, own_embedding=True, decoder=decoder(tie_word_embeddings=True)),
    ),
    "eagle1 of Qwen2": Layout(
        flat("Qwen2ForCausalLM", model_type="qwen2"), dataclasses.replace(EAGLE1, decoder=QWEN2)
    ),
    "eagle3": Layout(flat("LlamaForCausalLMEagle3"), EAGLE3, midlayer),
    "eagle3, pickled, with d2t": Layout(
        flat(draft_vocab_size=DRAFT),
        eagle3(decoder=DRAFTING, maps_vocabulary=True),
        midlayer,
        pickled=True,
    ),
    "eagle3, prefixed, with taps": Layout(
        flat(
            "Eagle3LlamaForCausalLM",
            draft_vocab_size=DRAFT,
            target_hidden_size=SIZE,
            eagle_config={
                "use_aux_hidden_state": True,
                TAPS: [6, 0, 0, 4],
                "norm_before_fc": True,
            },
        ),
        eagle3(
            decoder=DRAFTING,
            maps_vocabulary=True,
            own_embedding=True,
            taps=(6, 0, 0, 4),
            norm_before_fc=True,
        ),
        under_model,
    ),
    "eagle3 of another size, three layers": Layout(
        flat(hidden_size=48, head_dim=DIM, num_hidden_layers=3, attention_bias=False),
        eagle3(
            decoder=decoder(hidden_size=48, num_layers=3, windows=(None,) * 3),
            own_embedding=True,
        ),
        midlayer,
    ),
    "eagle3 that borrows all": Layout(flat(), eagle3(own_lm_head=False), midlayer),
    "eagle3 with new rope keys": Layout(
        flat(rope_theta=None, rope_parameters=LLAMA3_ROPE, dtype="bfloat16"),
        eagle3(
            decoder=decoder(
                rope=RopeSpec(700.0, "llama3", factor=8.0, original_max_position=16),
                dtype="bfloat16",
            )
        ),
    ),
    "eagle3.1": Layout(
        flat(fc_norm=True, norm_output=True, norm_before_residual=True),
        eagle3(fc_norms=True, norm_output=True, norm_before_residual=True),
        midlayer,
    ),
    "eagle3.1 with aux norms, unsaid": Layout(flat(), eagle3(fc_norms=True), aux_norms),
    "eagle3 with an unsaid input norm": Layout(flat(), eagle3(norm_before_fc=True)),
    "speculators eagle3": Layout(
        speculators(
            "eagle3",
            draft_vocab_size=DRAFT,
            target_hidden_size=None,
            norm_before_residual=True,
            norm_before_fc=False,
            fc_norm=False,
            norm_output=False,
            **{TAPS: [1, 2, 5]},
        ),
        eagle3(
            decoder=DRAFTING,
            maps_vocabulary=True,
            own_embedding=True,
            taps=(1, 2, 5),
            norm_before_residual=True,
        ),
    ),
    "speculators eagle3, all norms": Layout(
        speculators(
            "eagle3", dtype="bfloat16", norm_before_fc=True, fc_norm=True, norm_output=True
        ),
        eagle3(
            decoder=decoder(dtype="bfloat16"), norm_before_fc=True, fc_norms=True, norm_output=True
        ),
    ),
    "speculators eagle3 of Qwen3": Layout(
        speculators(
            "eagle3",
            transformer_layer_config={**LAYER_CONFIG, "model_type": "qwen3", "head_dim": DIM},
        ),
        eagle3(decoder=QWEN3),
    ),
    "speculators eagle": Layout(
        speculators("eagle", layernorms=False, fusion_bias=True),
        dataclasses.replace(EAGLE1, fc_bias=True, own_lm_head=True, own_embedding=True),
        fusion,
    ),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def write_layout(folder: Path, layout: Layout) -> Tensors:
    tensors = make_tensors(layout.spec)
    write(folder, layout.config, tensors, layout.rename, layout.pickled)
    return tensors


def make_target(spec: ModelSpec = TARGET, dtype: torch.dtype = torch.float64) -> LlamaModel:
    model = build(lambda: LlamaModel(spec), "cpu", dtype)
    fill_dummy(model, torch.device("cpu"), 7)
    return model


def load(folder: Path, spec: HeadSpec, dtype: str = "float64", **changes: Any) -> EagleHead:
    target = changes.pop("target", None) or make_target(dtype=getattr(torch, dtype))
    return load_head(
        spec, str(folder), device="cpu", dtype=dtype, target=target, num_positions=100, **changes
    )


@every_layout
def test_a_spec_has_every_field(tmp_path: Path, layout: Layout) -> None:
    write_layout(tmp_path, layout)
    found = read_head_spec(tmp_path, TARGET)
    assert dataclasses.asdict(found) == dataclasses.asdict(layout.spec)
    assert read_head_spec(tmp_path, TARGET, method=layout.spec.method) == found


def own_parameters(head: EagleHead, wanted: Tensors) -> dict[str, Tensor | None]:
    """Every parameter with the tensors it is to hold, stacked where the head stacks them."""

    def stacked(prefix: str, *names: str, kind: str = "weight") -> Tensor:
        return torch.cat([wanted[f"{prefix}.{name}.{kind}"] for name in names])

    parameters: dict[str, Tensor | None] = {}
    layers = {"first": "layers.0", **{f"rest.{i}": f"layers.{i + 1}" for i in range(9)}}
    for name, _ in head.named_parameters():
        module = name.removesuffix(".weight").removesuffix(".own")
        for ours, theirs in layers.items():
            module = module.replace(ours + ".", theirs + ".")
        if "qkv_proj" in module:
            prefix, kind = module.split(".qkv_proj")[0], name.rpartition(".")[2]
            parameters[name] = stacked(prefix, "q_proj", "k_proj", "v_proj", kind=kind)
        elif module.endswith("gate_up_proj"):
            parameters[name] = stacked(module.removesuffix(".gate_up_proj"), "gate_proj", "up_proj")
        else:
            plain = module if module in ("d2t", "fc.bias") else f"{module}.weight"
            parameters[name] = wanted.get(plain)
    return parameters


@every_layout
def test_every_tensor_lands_in_its_place(tmp_path: Path, layout: Layout) -> None:
    tensors = write_layout(tmp_path, layout)
    head = load(tmp_path, read_head_spec(tmp_path, TARGET), dtype="float32")
    wanted = own_parameters(head, tensors)
    for name, parameter in head.named_parameters():
        expected = wanted[name]
        assert expected is not None, name
        assert parameter.dtype == expected.dtype, name
        assert torch.equal(parameter, expected), name
    loaded = sum(parameter.numel() for parameter in head.parameters())
    assert loaded == sum(t.numel() for name, t in tensors.items() if name != "t2d")
    kv_layers = [head.first.self_attn.layer, *(layer.self_attn.layer for layer in head.rest)]
    assert kv_layers == [6 + index for index in range(layout.spec.decoder.num_layers)]


class CausalContext:
    """Attention of one sequence to itself, written out."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(
        self,
        layer: int,
        shape: AttentionShape,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
    ) -> Tensor:
        self.layers.append(layer)
        return attend(*turn_heads(qkv, shape.num_kv_heads, rotation, norms))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Angles in float32, as everywhere, so that the rest can be compared closely."""
    frequencies = 1.0 / THETA ** (torch.arange(0, DIM, 2) / DIM)
    angles = positions[:, None, None] * frequencies
    turn = torch.complex(angles.cos().double(), angles.sin().double())
    turned = turn * torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :])
    return torch.cat((turned.real, turned.imag), dim=-1)


class Plain:
    """A head written out tensor by tensor."""

    def __init__(self, tensors: Tensors, spec: HeadSpec, target: LlamaModel) -> None:
        self.w = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        self.spec = spec
        self.embedding = self.w.get("embed_tokens.weight", target.embed_tokens.weight)
        self.lm_head = self.w.get("lm_head.weight", target.lm_head.weight)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.w[f"{name}.weight"]

    def attention(self, prefix: str, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (
            (x @ self.w[f"{prefix}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM))
            for name in "qkv"
        )
        out = attend(rotate(q, positions), rotate(k, positions), v)
        return out.flatten(1) @ self.w[f"{prefix}.self_attn.o_proj.weight"].T

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up = (x @ self.w[f"{prefix}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return (F.silu(gate) * up) @ self.w[f"{prefix}.mlp.down_proj.weight"].T

    def finish(self, prefix: str, x: Tensor) -> Tensor:
        return x + self.mlp(prefix, self.norm(f"{prefix}.post_attention_layernorm", x))

    def condense(self, stacked: Tensor) -> Tensor:
        streams = list(stacked.unbind(dim=1))
        if self.spec.fc_norms:
            streams = [self.norm(f"fc_norm.{i}", x) for i, x in enumerate(streams)]
        x = torch.cat(streams, dim=-1)
        x = self.norm("input_norm", x) if self.spec.norm_before_fc else x
        return x @ self.w["fc.weight"].T + self.w.get("fc.bias", 0)

    def forward(self, tokens: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding[tokens]
        if self.spec.method == "eagle":
            x = torch.cat((embedded, feature), -1) @ self.w["fc.weight"].T
            x = x + self.w.get("fc.bias", 0)
            x = x + self.attention("layers.0", x, positions)
        else:
            normed = self.norm("layers.0.hidden_norm", feature)
            joined = torch.cat((self.norm("layers.0.input_layernorm", embedded), normed), -1)
            start = normed if self.spec.norm_before_residual else feature
            x = start + self.attention("layers.0", joined, positions)
        x = self.finish("layers.0", x)
        for index in range(1, self.spec.decoder.num_layers):
            prefix = f"layers.{index}"
            normed = self.norm(f"{prefix}.input_layernorm", x)
            x = self.finish(prefix, x + self.attention(prefix, normed, positions))
        if self.spec.method == "eagle":
            return x, x
        normed = self.norm("norm", x)
        return normed, normed if self.spec.norm_output else x


TWO_LAYERS = decoder(num_layers=2, windows=(None, None))
COMPUTED = {
    "eagle1": EAGLE1,
    "eagle1 with bias": dataclasses.replace(EAGLE1, fc_bias=True),
    "eagle1 with its own ends": dataclasses.replace(EAGLE1, own_embedding=True, own_lm_head=True),
    "eagle1 with two layers": dataclasses.replace(EAGLE1, decoder=TWO_LAYERS),
    "eagle3": EAGLE3,
    "eagle3 norm_before_residual": eagle3(norm_before_residual=True),
    "eagle3 norm_output": eagle3(norm_output=True),
    "eagle3 norm_before_fc": eagle3(norm_before_fc=True),
    "eagle3 fc_norms": eagle3(fc_norms=True),
    "eagle3 fc_bias": eagle3(fc_bias=True),
    "eagle3 all flags": eagle3(
        norm_before_residual=True, norm_output=True, norm_before_fc=True, fc_norms=True
    ),
    "eagle3 with two layers": eagle3(decoder=TWO_LAYERS),
    "eagle3 that borrows its lm_head": eagle3(own_lm_head=False),
    "eagle3 of another size with d2t": eagle3(
        decoder=decoder(hidden_size=48, vocab_size=DRAFT),
        own_embedding=True,
        maps_vocabulary=True,
    ),
}


def config_of(spec: HeadSpec) -> Config:
    layers = {
        "hidden_size": spec.decoder.hidden_size,
        "head_dim": DIM,
        "num_hidden_layers": spec.decoder.num_layers,
    }
    if spec.method == "eagle":
        return flat(**layers)
    flags = {
        "fc_norm": spec.fc_norms,
        "norm_before_fc": spec.norm_before_fc,
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
    }
    return flat(**layers, **flags, draft_vocab_size=spec.decoder.vocab_size)


def run_twice(head: Any, spec: HeadSpec, forward: Callable[..., Any]) -> list[Tensor]:
    """What a head gives for a sequence, and then for its own features."""
    generator = torch.Generator().manual_seed(3)
    streams = [torch.randn(9, SIZE, generator=generator).double() for _ in range(3)]
    tokens = torch.randint(VOCAB, (9,), generator=generator)
    positions = torch.arange(5, 14)
    stacked = torch.stack(streams, dim=1)
    feature = head.condense(stacked) if spec.method == "eagle3" else streams[0]
    states, fed_back = forward(tokens, feature, positions)
    return [states, fed_back, *forward(tokens.flip(0), fed_back, positions + 1)]


@pytest.mark.parametrize("spec", COMPUTED.values(), ids=COMPUTED)
def test_a_loaded_head_computes_what_the_papers_say(tmp_path: Path, spec: HeadSpec) -> None:
    tensors = make_tensors(spec)
    write(tmp_path, config_of(spec), tensors)
    assert read_head_spec(tmp_path, TARGET) == spec
    target, ctx = make_target(), CausalContext()
    head = load(tmp_path, spec, target=target)
    plain = Plain(tensors, spec, target)
    wanted = run_twice(plain, spec, plain.forward)
    found = run_twice(head, spec, lambda *inputs: head.finish(head(*inputs, ctx)))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    logits = wanted[0] @ plain.lm_head.T
    torch.testing.assert_close(head.logits(found[0]), logits, rtol=1e-9, atol=1e-9)
    assert ctx.layers == 2 * [6 + index for index in range(spec.decoder.num_layers)]


@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "norm_output", "norm_before_fc", "fc_norms", "fc_bias"]
)
def test_no_flag_is_without_effect(flag: str) -> None:
    """Or the test above would not see it lost."""
    spec, target = eagle3(**{flag: True}), make_target()
    tensors = make_tensors(spec)
    plain = Plain(tensors, spec, target)
    without = Plain({k: v for k, v in tensors.items() if k != "fc.bias"}, EAGLE3, target)
    results = [run_twice(head, head.spec, head.forward)[2] for head in (plain, without)]
    assert (results[0] - results[1]).abs().max() > 0.01


def test_drafts_are_numbered_through_d2t(tmp_path: Path) -> None:
    spec = eagle3(decoder=DRAFTING, maps_vocabulary=True)
    write(tmp_path, flat(draft_vocab_size=DRAFT), make_tensors(spec), midlayer)
    head = load(tmp_path, spec)
    assert head.target_ids(torch.tensor([0, 1, 7, 8, 23])).tolist() == [0, 2, 14, 16, 31]


def test_canonical_names() -> None:
    stored = {
        "midlayer.hidden_norm.weight": "layers.0.hidden_norm.weight",
        "model.layers.1.mlp.up_proj.weight": "layers.1.mlp.up_proj.weight",
        "model.midlayer.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
        "transformer.self_attn.q_proj.weight": "layers.0.self_attn.q_proj.weight",
        "fusion_fc.bias": "fc.bias",
        "fc.weight": "fc.weight",
        "aux_norm_low.weight": "fc_norm.0.weight",
        "aux_norm_mid.weight": "fc_norm.1.weight",
        "aux_norm_high.weight": "fc_norm.2.weight",
        "d2t": "d2t",
    }
    assert canonical_names(stored) == {canonical: name for name, canonical in stored.items()}


def test_two_names_of_one_tensor_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"both layers\.0\.a and midlayer\.a, which mean"):
        canonical_names(["midlayer.a", "layers.0.a"])


def test_derived_tensors_are_passed_over(tmp_path: Path) -> None:
    tensors = make_tensors(EAGLE3)
    for name in ("rotary_emb", "layers.0.self_attn.rotary_emb"):
        tensors[f"{name}.inv_freq"] = torch.ones(4)
    tensors["t2d"] = torch.ones(VOCAB, dtype=torch.bool)
    write(tmp_path, flat(), tensors, midlayer)
    assert read_head_spec(tmp_path, TARGET) == EAGLE3
    assert load(tmp_path, EAGLE3).d2t is None


def test_a_tied_head_of_eagle3_has_its_embedding_as_lm_head(tmp_path: Path) -> None:
    spec = eagle3(decoder=decoder(tie_word_embeddings=True), own_embedding=True)
    tensors = make_tensors(spec)
    del tensors["lm_head.weight"]
    write(tmp_path, flat(tie_word_embeddings=True), tensors, midlayer)
    assert read_head_spec(tmp_path, TARGET) == spec
    head = load(tmp_path, spec)
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, tensors["embed_tokens.weight"].double())


def test_a_stored_lm_head_goes_before_a_tied_one(tmp_path: Path) -> None:
    spec = eagle3(decoder=decoder(tie_word_embeddings=True), own_embedding=True)
    tensors = make_tensors(spec)
    write(tmp_path, flat(tie_word_embeddings=True), tensors, midlayer)
    head = load(tmp_path, read_head_spec(tmp_path, TARGET))
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"].double())


@pytest.mark.parametrize("spec", COMPUTED.values(), ids=COMPUTED)
@pytest.mark.parametrize("index", [None, [3, 0, 3]])
def test_taken_rows_are_finished_ones(
    tmp_path: Path, spec: HeadSpec, index: list[int] | None
) -> None:
    write(tmp_path, config_of(spec), make_tensors(spec))
    head = load(tmp_path, spec)
    stream = torch.randn(4, head.spec.decoder.hidden_size).double()
    states, onward = head.finish(stream if index is None else stream[index])
    features = torch.full((6, stream.shape[1]), 7.0).double()
    chosen = None if index is None else torch.tensor(index)
    assert torch.equal(head.take(stream, chosen, features), states)
    assert torch.equal(features[: len(onward)], onward)
    assert not features[len(onward) :].any()


@pytest.mark.parametrize("same", [True, False])
def test_a_copy_of_the_targets_embedding_is_shared(
    tmp_path: Path, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Stored in float32, the same only as cast to the engine's bfloat16."""
    target = make_target(dtype=torch.bfloat16)
    spec = eagle3(own_embedding=True)
    tensors = make_tensors(spec)
    tensors["embed_tokens.weight"] = target.embed_tokens.weight.float() * (1 + 1e-4)
    if not same:
        tensors["embed_tokens.weight"][-1, -1] += 0.5
    write(tmp_path, flat(), tensors, midlayer)
    caplog.set_level(logging.INFO)
    head = load(tmp_path, spec, dtype="bfloat16", target=target)
    assert (head.embed_tokens is None) == same
    assert head.spec.own_embedding != same
    assert ("bit for bit: shared" in caplog.text) == same
    features = torch.zeros(2, SIZE, dtype=torch.bfloat16)
    states = head(torch.tensor([1, 2]), features, torch.arange(2), CausalContext())
    assert states.shape == (2, SIZE)


def test_the_rotary_table_is_as_long_as_the_engine_asks(tmp_path: Path) -> None:
    write(tmp_path, flat(), make_tensors(EAGLE1))
    head = load(tmp_path, EAGLE1)
    assert head.rotary is not None
    assert head.rotary.table.shape == (2, 100, DIM // 2)  # its own limit is 64


def test_progress_is_told(tmp_path: Path) -> None:
    write(tmp_path, flat(), make_tensors(EAGLE1))
    told: list[tuple[str, int, int | None]] = []
    head = load(tmp_path, EAGLE1, report=lambda *line: told.append(line))
    total = sum(parameter.numel() for parameter in head.parameters())
    assert told[-1] == ("loading weights", total, total)
    assert len(told) == len(list(head.weight_slots()))


def log_line(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = (r for r in caplog.records if r.name == "stoop.models.head_config")
    assert record.levelno == logging.INFO
    return record.getMessage()


def test_one_line_tells_what_was_settled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layout = LAYOUTS["eagle3, prefixed, with taps"]
    write_layout(tmp_path, layout)
    read_head_spec(tmp_path, TARGET)
    assert log_line(caplog) == (
        f"draft head {tmp_path}: method eagle3, EAGLE layout, taps=(6, 0, 0, 4) (config), "
        "norm_before_fc=True (config), fc_norm=False (tensors), "
        "norm_before_residual=False (default), norm_output=False (default), "
        "fc_bias=False (tensors), embedding: its own, lm_head: its own, "
        "drafts from 24 of 40 tokens through d2t, drafts to position 64 of the target's 128 only"
    )


def test_the_line_tells_defaults_and_what_is_borrowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, speculators("eagle3"), make_tensors(eagle3(own_lm_head=False)))
    read_head_spec(tmp_path, dataclasses.replace(TARGET, max_position=64))
    line = log_line(caplog)
    assert "speculators layout, taps=(2, 3, 3) (default)" in line
    assert "embedding: the target's, lm_head: the target's, drafts from 40 of 40 tokens" in line
    assert "position" not in line


def test_the_line_tells_a_bias_that_the_config_has_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, flat(bias=True), make_tensors(EAGLE1))
    assert read_head_spec(tmp_path, TARGET).fc_bias is False
    assert "fc_bias=False (tensors, against bias=True of the config)" in log_line(caplog)


@pytest.mark.parametrize(
    ("num_layers", "taps"), [(30, (2, 15, 27)), (6, (2, 3, 3)), (2, (2, 1, 0)), (1, (1, 0, 0))]
)
def test_default_taps(tmp_path: Path, num_layers: int, taps: tuple[int, ...]) -> None:
    write(tmp_path, flat(), make_tensors(EAGLE3), midlayer)
    target = dataclasses.replace(TARGET, num_layers=num_layers)
    assert read_head_spec(tmp_path, target).taps == taps


# What is done to a good head of EAGLE-3 with d2t, and the sentence that refuses it.
Harm = Callable[[Config, Tensors], object]
EAGLE3_HARMS: dict[str, tuple[Harm, str]] = {
    "target_hidden_size": (
        lambda c, t: c.update(target_hidden_size=64),
        "target with hidden_size 64, but this one has 32",
    ),
    "taps of fc": (
        lambda c, t: c.update({TAPS: [1, 2]}),
        "takes 96 values, but 2 taps (by config) of the target's hidden_size 32 make 64",
    ),
    "fc of another target": (
        lambda c, t: t.update({"fc.weight": torch.zeros(SIZE, 3 * 16)}),
        "takes 48 values, but 3 taps (by default) of the target's hidden_size 32 make 96",
    ),
    "tap out of range": (
        lambda c, t: c.update({TAPS: [1, 2, 7]}),
        "taps layer 7, but the target has 6 layers, so that taps go from 0 to 6",
    ),
    "negative tap": (lambda c, t: c.update({TAPS: [-1, 2, 3]}), "taps layer -1, but the target"),
    "no list of taps": (lambda c, t: c.update({TAPS: 3}), f"{TAPS}=3 where a list"),
    "no taps": (lambda c, t: c.update({TAPS: []}), f"{TAPS}=[] where a list"),
    "two lists of taps": (
        lambda c, t: c.update({TAPS: [1, 2, 3], "eagle_config": {TAPS: [1, 2, 4]}}),
        "[1, 2, 3] and, in eagle_config, [1, 2, 4]: keep the one",
    ),
    "no aux states": (
        lambda c, t: c.update(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state=False",
    ),
    "eagle_config of another kind": (
        lambda c, t: c.update(eagle_config=[1]),
        "eagle_config=[1] where an object is needed",
    ),
    "size of a shared embedding": (
        lambda c, t: c.update(hidden_size=48, head_dim=DIM),
        "hidden_size 48 and the target 32, but a head that borrows its embed_tokens has",
    ),
    "rows of the embedding": (
        lambda c, t: t.update({"embed_tokens.weight": torch.zeros(50, SIZE)}),
        "embed_tokens.weight has 50 rows, but the target's vocabulary has 40 tokens",
    ),
    "rows of lm_head": (
        lambda c, t: t.update({"lm_head.weight": torch.zeros(20, SIZE)}),
        "lm_head.weight has 20 rows, but it drafts from 24 tokens",
    ),
    "vocabulary of the target": (
        lambda c, t: c.update(vocab_size=41),
        "vocabulary of 41 tokens, but the target has 40",
    ),
    "more drafts than tokens": (
        lambda c, t: c.update(draft_vocab_size=41),
        "drafts from 41 tokens, but the target has only 40",
    ),
    "no d2t": (
        lambda c, t: t.pop("d2t"),
        "drafts from 24 of the target's 40 tokens but has no d2t",
    ),
    "length of d2t": (
        lambda c, t: t.update(d2t=torch.zeros(23, dtype=torch.int64)),
        "d2t has shape [23], but draft_vocab_size is 24",
    ),
    "no lm_head": (
        lambda c, t: t.pop("lm_head.weight"),
        "24 of the target's 40 tokens through d2t but has no lm_head.weight",
    ),
    "tied, with fewer drafts": (
        lambda c, t: (
            t.pop("lm_head.weight"),
            t.update({"embed_tokens.weight": torch.zeros(VOCAB, SIZE)}),
            c.update(tie_word_embeddings=True),
        ),
        "has 40 rows, but it drafts from 24 tokens",
    ),
    "missing tensor": (
        lambda c, t: t.pop("layers.0.mlp.up_proj.weight"),
        "the draft head lacks layers.0.mlp.up_proj.weight",
    ),
    "no fc": (lambda c, t: t.pop("fc.weight"), "the draft head lacks fc.weight"),
    "unknown tensor": (
        lambda c, t: t.update(mask_hidden=torch.zeros(3)),
        "the draft head has mask_hidden, which config.json does not account for",
    ),
    "shape": (
        lambda c, t: t.update({"norm.weight": torch.zeros(31)}),
        "tensor norm.weight has shape [31] where config.json asks for [32]",
    ),
    "layers": (
        lambda c, t: c.update(num_hidden_layers=6),
        "num_hidden_layers=6, but the head's weights have 1 layers",
    ),
    "norm_before_fc without its norm": (
        lambda c, t: c.update(norm_before_fc=True),
        "norm_before_fc=True, but the weights lack input_norm.weight",
    ),
    "norm_before_fc denied": (
        lambda c, t: (
            c.update(eagle_config={"norm_before_fc": False}),
            t.update({"input_norm.weight": torch.zeros(96)}),
        ),
        "norm_before_fc=False, but the weights have input_norm.weight",
    ),
    "fc_norm without its norms": (
        lambda c, t: c.update(fc_norm=True),
        "fc_norm=True, but the weights lack fc_norm.0.weight",
    ),
    "too few of fc_norm": (
        lambda c, t: t.update({"fc_norm.0.weight": torch.zeros(SIZE)}),
        "lacks fc_norm.1.weight and 1 more tensors",
    ),
    "a flag that is none": (
        lambda c, t: c.update(norm_output="yes"),
        "norm_output='yes' where true or false",
    ),
    "flags that differ": (
        lambda c, t: c.update(norm_output=True, eagle_config={"norm_output": False}),
        "norm_output=True and, in eagle_config, False",
    ),
    "an EAGLE-1 name": (
        lambda c, t: c.update(architectures=["LlamaForCausalLMEagle"]),
        "names a head of 'eagle', but the weights are of 'eagle3', for its weights have layers.0",
    ),
    "another architecture": (
        lambda c, t: c.update(architectures=["GptOssForCausalLMEagle3"]),
        "architecture is GptOssForCausalLMEagle3: stoop loads EAGLE heads",
    ),
    "quantised": (
        lambda c, t: c.update(quantization_config={"quant_method": "fp8"}),
        "quantised (fp8)",
    ),
}

EAGLE1_HARMS: dict[str, tuple[Harm, str]] = {
    "size": (
        lambda c, t: c.update(hidden_size=48, head_dim=DIM),
        "hidden_size 48 and the target 32, but a head that borrows its embed_tokens and lm_head",
    ),
    "size with its own ends": (
        lambda c, t: (
            c.update(hidden_size=48, head_dim=DIM),
            t.update({"embed_tokens.weight": torch.zeros(VOCAB, 48)}),
            t.update({"lm_head.weight": torch.zeros(VOCAB, 48)}),
        ),
        "hidden_size 48 and the target 32, but a head that is of EAGLE-1 has to have the target's",
    ),
    "lm_head": (
        lambda c, t: t.update({"lm_head.weight": torch.zeros(39, SIZE)}),
        "lm_head.weight has 39 rows, but it drafts from 40 tokens",
    ),
    "fc": (
        lambda c, t: t.update({"fc.weight": torch.zeros(SIZE, 48)}),
        "tensor fc.weight has shape [32, 48] where config.json asks for [32, 64]",
    ),
    "an input norm": (
        lambda c, t: t.update({"layers.0.input_layernorm.weight": torch.zeros(SIZE)}),
        "the draft head has layers.0.input_layernorm.weight",
    ),
    "a flag of EAGLE-3": (
        lambda c, t: c.update(norm_output=True),
        "norm_output=True, but the head is of EAGLE-1",
    ),
    "taps": (lambda c, t: c.update({TAPS: [1, 2, 3]}), f"{TAPS}=[1, 2, 3], but the head is of"),
    "an EAGLE-3 name": (
        lambda c, t: c.update(architectures=["LlamaForCausalLMEagle3"]),
        "names a head of 'eagle3', but the weights are of 'eagle', for its weights lack layers",
    ),
    "no weights of a head": (
        lambda c, t: (t.clear(), t.update({"lm_head.weight": torch.zeros(VOCAB, SIZE)})),
        "num_hidden_layers=1, but the head's weights have 0 layers",
    ),
}

SPECULATORS_HARMS: dict[str, tuple[Harm, str]] = {
    "layernorms": (lambda c, t: c.update(layernorms=True), "layernorms=True"),
    "fusion_bias": (
        lambda c, t: c.update(fusion_bias=True),
        "fusion_bias=True, but the weights lack fc.bias",
    ),
    "another method": (
        lambda c, t: c.update(speculators_model_type="mtp"),
        "speculators_model_type is 'mtp': stoop loads eagle, eagle3",
    ),
    "other layers": (
        lambda c, t: c.update(transformer_layer_config={**LAYER_CONFIG, "model_type": "gemma"}),
        "model_type 'gemma': stoop loads llama, mistral, qwen2, qwen3",
    ),
    "no layers": (
        lambda c, t: c.pop("transformer_layer_config"),
        "has no transformer_layer_config",
    ),
}

HARMS = {
    f"{kind}: {name}": (kind, harm, sentence)
    for kind, harms in (
        ("eagle3", EAGLE3_HARMS),
        ("eagle", EAGLE1_HARMS),
        ("speculators", SPECULATORS_HARMS),
    )
    for name, (harm, sentence) in harms.items()
}


@pytest.mark.parametrize(("kind", "harm", "sentence"), HARMS.values(), ids=HARMS)
def test_what_does_not_fit_is_refused(tmp_path: Path, kind: str, harm: Harm, sentence: str) -> None:
    config, spec = {
        "eagle3": (flat(draft_vocab_size=DRAFT), eagle3(decoder=DRAFTING, maps_vocabulary=True)),
        "eagle": (flat(), EAGLE1),
        "speculators": (speculators("eagle"), EAGLE1),
    }[kind]
    tensors = make_tensors(spec)
    write(tmp_path, config, tensors)
    assert read_head_spec(tmp_path, TARGET) == spec  # before it is harmed
    harm(config, tensors)
    write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=re.escape(sentence)) as caught:
        read_head_spec(tmp_path, TARGET)
    assert ": " in str(caught.value) or "needed" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "asked"), [(EAGLE1, "eagle3"), (EAGLE3, "eagle")], ids=["eagle", "eagle3"]
)
def test_another_method_than_asked_is_refused(tmp_path: Path, spec: HeadSpec, asked: str) -> None:
    write(tmp_path, flat(), make_tensors(spec))
    sentence = f"method '{asked}' is asked for, but the head in {tmp_path} is '{spec.method}'"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_head_spec(tmp_path, TARGET, method=asked)


def test_a_method_without_heads_is_refused(tmp_path: Path) -> None:
    write(tmp_path, flat(), make_tensors(EAGLE1))
    with pytest.raises(ConfigError, match="method 'ngram' has no head"):
        read_head_spec(tmp_path, TARGET, method="ngram")


@pytest.mark.parametrize(
    ("d2t", "sentence"),
    [
        (
            [0] * 23 + [17],
            "leads draft token 23 to token 40, but the target's tokens go from 0 to 39",
        ),
        ([0, -2] + [0] * 22, "leads draft token 1 to token -1, but"),
        ([0, 0, 0, 2] + [0] * 20, "leads both draft tokens 3 and 5 to token 5"),
        ([0.0] * 24, "d2t is of float32 where whole numbers are needed"),
    ],
)
def test_a_bad_d2t_is_refused(tmp_path: Path, d2t: list[Any], sentence: str) -> None:
    tensors = make_tensors(eagle3(decoder=DRAFTING, maps_vocabulary=True))
    tensors["d2t"] = torch.tensor(d2t)
    write(tmp_path, flat(draft_vocab_size=DRAFT), tensors)
    spec = read_head_spec(tmp_path, TARGET)
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, spec)


def test_the_last_token_may_be_drafted(tmp_path: Path) -> None:
    tensors = make_tensors(eagle3(decoder=DRAFTING, maps_vocabulary=True))
    tensors["d2t"] = torch.tensor([0] * 23 + [16], dtype=torch.int32)
    write(tmp_path, flat(draft_vocab_size=DRAFT), tensors)
    head = load(tmp_path, read_head_spec(tmp_path, TARGET))
    assert head.target_ids(torch.tensor([23])).tolist() == [VOCAB - 1]


def write_config(folder: Path, config: Config) -> None:
    (folder / "config.json").write_text(json.dumps(config))


DUMMIES = {
    "eagle3": (flat("LlamaForCausalLMEagle3"), None, EAGLE3),
    "eagle3 by its keys": (
        flat(draft_vocab_size=DRAFT, norm_before_fc=True, fc_norm=True),
        None,
        eagle3(decoder=DRAFTING, maps_vocabulary=True, norm_before_fc=True, fc_norms=True),
    ),
    "eagle3 as asked": (flat(), "eagle3", EAGLE3),
    "eagle as asked": (flat(), "eagle", EAGLE1),
    "eagle with a bias": (
        flat("LlamaForCausalLMEagle", bias=True),
        "eagle",
        dataclasses.replace(EAGLE1, fc_bias=True),
    ),
    "speculators": (speculators("eagle3", **{TAPS: [0, 6]}), "eagle3", eagle3(taps=(0, 6))),
}


@pytest.mark.parametrize(("config", "method", "spec"), DUMMIES.values(), ids=DUMMIES)
def test_a_dummy_needs_its_config_alone(
    tmp_path: Path, config: Config, method: str | None, spec: HeadSpec
) -> None:
    write_config(tmp_path, config)
    assert read_head_spec(tmp_path, TARGET, method, dummy=True) == spec
    target = make_target()
    heads = [
        load_head(
            spec,
            None,
            device="cpu",
            dtype="float64",
            target=target,
            num_positions=32,
            dummy_seed=seed,
        )
        for seed in (5, 5, 6)
    ]
    states = [head.fc.weight for head in heads]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert heads[0].first.post_attention_layernorm.weight.eq(1).all()
    assert heads[0].target_ids(torch.tensor([0, 23])).tolist() == [0, 23]
    if spec.fc_bias:
        assert heads[0].fc.bias.eq(0).all()


@pytest.mark.parametrize(
    ("config", "method", "error", "sentence"),
    [
        (flat(), None, ConfigError, "leaves open whether the head is eagle or eagle3"),
        (flat(draft_vocab_size=9), "eagle", ConfigError, "for its config.json has draft_vocab"),
        (flat("EagleLlamaForCausalLM"), "eagle3", ConfigError, "its config.json says so"),
        (flat(), "eagle4", ConfigError, "method 'eagle4' has no head"),
        (flat(hidden_size=64), "eagle3", CheckpointError, "hidden_size 64, but this one has 32"),
        (flat(vocab_size=9), "eagle", CheckpointError, "of 9 tokens, but the target has 40"),
    ],
)
def test_a_dummy_that_cannot_be_is_refused(
    tmp_path: Path, config: Config, method: str | None, error: type[Exception], sentence: str
) -> None:
    write_config(tmp_path, config)
    with pytest.raises(error, match=sentence):
        read_head_spec(tmp_path, TARGET, method, dummy=True)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_read_where_allowed(tmp_path: Path, zipped: bool) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    with WeightReader(tmp_path, allow_pickle=True) as reader:
        assert reader.names() == {"a", "b"}
        assert reader.shape("a") == (2, 3)
        assert reader.total_bytes == 6 * 4 + 4 * 8
        kept = reader.tensor("a")
        assert torch.equal(reader.tensor("b"), tensors["b"])
    assert torch.equal(kept, tensors["a"])
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        WeightReader(tmp_path)
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert WeightReader(tmp_path, allow_pickle=True).names() == {"c"}


class Code:
    """Something that a pickle would have to run code for."""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"a": Code()}, "more than tensors, which could run code as it is read: convert it"),
        ({"a": 3}, "has int 'a' among its tensors: convert it"),
        ([torch.ones(1)], "holds no tensors by name: convert it"),
    ],
)
def test_pickles_of_other_things_are_refused(
    tmp_path: Path, content: object, sentence: str
) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=sentence):
        WeightReader(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("kept", [0, 1, 300, -900])
def test_a_damaged_pickle_is_named(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2000)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is (truncated or )?damaged"):
        WeightReader(tmp_path, allow_pickle=True)


def test_taps_under_their_other_name(tmp_path: Path) -> None:
    """Some heads list their taps as `layer_ids`; two lists that differ are refused."""
    config = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLMEagle3"]}
    config |= {"eagle_config": {"layer_ids": [1, 2, 4]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_head_spec(tmp_path, TARGET, "eagle3", dummy=True).taps == (1, 2, 4)
    (tmp_path / "config.json").write_text(json.dumps({**config, TAPS: [1, 2, 3]}))
    with pytest.raises(CheckpointError, match=r"\[1, 2, 3\].*\[1, 2, 4\]"):
        read_head_spec(tmp_path, TARGET, "eagle3", dummy=True)
