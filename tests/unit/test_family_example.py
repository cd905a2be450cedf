"""A family outside of stoop, as examples/my_family.py registers it, answers as plain torch does."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import stoop
from stoop import LLM, SamplingParams
from stoop.config.errors import CheckpointError, ConfigError
from stoop.models import registry
from stoop.models.llama import LLAMA
from stoop.models.loader import count_parameters

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_family.py"
VOCAB, SIZE, INNER, LAYERS, HEADS, KV_HEADS, DIM = 48, 32, 40, 2, 4, 2, 8
EPS, BASE, SCALE = 1e-5, 500.0, 3.0
CONFIG: dict[str, Any] = {
    "architectures": ["GullForCausalLM"],
    "n_vocab": VOCAB,
    "n_embd": SIZE,
    "n_inner": INNER,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_kv_head": KV_HEADS,
    "n_ctx": 128,
    "norm_eps": EPS,
    "rotary_base": BASE,
    "embd_scale": SCALE,
    "torch_dtype": "float64",
}
PROMPTS = [[5, 9, 3, 40], [7], list(range(1, 30))]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Registered for these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_families", dict(registry._families))
        spec = importlib.util.spec_from_file_location("my_family", EXAMPLE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "my_family", module)
        spec.loader.exec_module(module)
        yield module


def make_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (VOCAB, SIZE),
        "final_norm.weight": (SIZE,),
        "unembed.weight": (VOCAB, SIZE),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blocks.{layer}.norm_1.weight": (SIZE,),
            f"blocks.{layer}.norm_2.weight": (SIZE,),
            f"blocks.{layer}.attn.q.weight": (HEADS * DIM, SIZE),
            f"blocks.{layer}.attn.k.weight": (KV_HEADS * DIM, SIZE),
            f"blocks.{layer}.attn.v.weight": (KV_HEADS * DIM, SIZE),
            f"blocks.{layer}.attn.out.weight": (SIZE, HEADS * DIM),
            f"blocks.{layer}.mlp.gate.weight": (INNER, SIZE),
            f"blocks.{layer}.mlp.up.weight": (INNER, SIZE),
            f"blocks.{layer}.mlp.down.weight": (SIZE, INNER),
        }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gull")
    save_file(make_tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


# ---- the same model in plain torch ----


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: Tensor) -> Tensor:
    """x: [heads, tokens, DIM], rotated by halves. Angles in float32, as checkpoints are trained."""
    inverse = 1.0 / (BASE ** (torch.arange(0, DIM, 2).float() / DIM))
    angles = torch.arange(x.shape[1]).float()[:, None] * inverse
    cos, sin = angles.cos().double(), angles.sin().double()
    first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def next_token(tensors: dict[str, Tensor], ids: list[int], scale: float) -> int:
    stream = tensors["wte.weight"][ids] * scale
    for layer in range(LAYERS):
        w = {
            name.removeprefix(f"blocks.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
        }
        x = norm(stream, w["norm_1"])
        q, k, v = (
            (x @ w[f"attn.{name}"].T).view(len(ids), -1, DIM).transpose(0, 1) for name in "qkv"
        )
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        stream = stream + out.transpose(0, 1).reshape(len(ids), -1) @ w["attn.out"].T
        x = norm(stream, w["norm_2"])
        stream = stream + (F.silu(x @ w["mlp.gate"].T) * (x @ w["mlp.up"].T)) @ w["mlp.down"].T
    state = norm(stream[-1], tensors["final_norm.weight"])
    return int((state @ tensors["unembed.weight"].T).argmax())


def greedy(prompt: list[int], count: int, scale: float = SCALE) -> list[int]:
    tensors, ids = make_tensors(), list(prompt)
    for _ in range(count):
        ids.append(next_token(tensors, ids, scale))
    return ids[len(prompt) :]


# ---- tests ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graph_mode": "step"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=["eager", "graphs", "drafts"],
)
def test_the_example_answers_as_plain_torch_does(
    example: ModuleType, checkpoint: Path, options: dict[str, Any]
) -> None:
    llm = LLM(str(checkpoint), device="cpu", skip_tokenizer_init=True, **options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    assert [list(answer) for answer in answers] == [greedy(prompt, 24) for prompt in PROMPTS]


def test_the_scale_matters() -> None:
    assert greedy(PROMPTS[0], 24) != greedy(PROMPTS[0], 24, scale=1.0)


def test_its_parameters_are_counted(example: ModuleType, checkpoint: Path) -> None:
    spec = registry.read_model_spec(checkpoint)
    assert count_parameters(spec) == sum(tensor.numel() for tensor in make_tensors().values())


def test_a_config_with_other_layers_is_refused(example: ModuleType, tmp_path: Path) -> None:
    save_file(make_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"n_layer": LAYERS + 1}))
    with pytest.raises(CheckpointError, match="3, but the weights have 2 layers"):
        LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True)


def test_an_unknown_architecture_is_told_of_registered_ones(
    example: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Tern"]}))
    with pytest.raises(CheckpointError, match=r"is Tern: stoop loads LlamaForCausalLM.*, GullFor"):
        registry.read_model_spec(tmp_path)


def test_an_architecture_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM is registered already"):
        stoop.register_model(LLAMA)


@pytest.mark.parametrize("wrong", [None, "GullForCausalLM", dict])
def test_only_families_are_registered(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"pass a stoop\.models\.family\.Family"):
        stoop.register_model(wrong)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100
