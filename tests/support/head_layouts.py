"""Draft heads of every layout, as their makers would write them down."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stoop.config.schema import DeviceConfig
from stoop.layers.rope import RopeSpec
from stoop.models.decoder import DecoderModel, DecoderSpec
from stoop.models.eagle import EagleHead, EagleSpec
from stoop.models.head_loader import load_head
from stoop.models.loader import build, fill_dummy

VOCAB, DRAFT, SIZE, MLP, HEADS, KV, DIM, EPS = 40, 24, 32, 48, 4, 2, 8, 1e-5
THETA = 5000.0
TAPS = "eagle_aux_hidden_state_layer_ids"

TARGET = DecoderSpec(
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
EAGLE1 = EagleSpec("eagle", DECODER, SIZE, VOCAB, own_lm_head=False)
EAGLE3 = EagleSpec("eagle3", DECODER, SIZE, VOCAB, taps=(2, 3, 3))

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


def layer_tensors(prefix: str, width: int, norms: tuple[str, ...], spec: DecoderSpec) -> Config:
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


def make_tensors(spec: EagleSpec, seed: int = 0) -> Tensors:
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
    spec: EagleSpec
    rename: Callable[[str], str] = keep
    pickled: bool = False


def eagle3(**changes: Any) -> EagleSpec:
    return dataclasses.replace(EAGLE3, **changes)


def decoder(**changes: Any) -> DecoderSpec:
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


def make_target(spec: DecoderSpec = TARGET, dtype: torch.dtype = torch.float64) -> DecoderModel:
    model = build(lambda: DecoderModel(spec), DeviceConfig.of("cpu", str(dtype)[len("torch.") :]))
    fill_dummy(model, torch.device("cpu"), 7)
    return model


def load(folder: Path, spec: EagleSpec, dtype: str = "float64", **changes: Any) -> EagleHead:
    target = changes.pop("target", None) or make_target(dtype=getattr(torch, dtype))
    return load_head(
        spec,
        str(folder),
        device=DeviceConfig.of("cpu", dtype),
        target=target,
        num_positions=100,
        **changes,
    )
