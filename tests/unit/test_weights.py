"""Weights as values: matrices in another dtype than that of computation, and in other schemes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoop import LLM, SamplingParams
from stoop.checkpoint import toy
from stoop.config.errors import CheckpointError
from stoop.config.schema import DeviceConfig
from stoop.layers.embedding import Embedding, OutputHead
from stoop.layers.linear import FusedLinear
from stoop.layers.norm import RMSNorm
from stoop.layers.weights import MatrixLayer, store_matrices_as
from stoop.models.loader import build
from stoop.ops.dense import dense
from stoop.ops.weight import Scheme, Weight

VOCAB, SIZE = 96, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


class Rows8(Scheme):
    """Whole numbers of 8 bits and a scale for each row: as simple as a packed scheme can be."""

    name = "rows8"

    def empty(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Weight:
        data = torch.empty(num_outputs, num_inputs, dtype=torch.int8)
        return Weight(data, torch.empty(num_outputs, 1, dtype=dtype), self)

    def shape(self, weight: Weight) -> tuple[int, ...]:
        return tuple(weight.data.shape)

    def store(self, weight: Weight, values: Tensor) -> None:
        assert weight.scales is not None
        weight.scales.copy_(values.abs().amax(1, keepdim=True) / 127)
        weight.data.copy_((values / weight.scales).round())

    def unpack(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        assert weight.scales is not None
        return weight.data.to(dtype) * weight.scales.to(dtype)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.unpack(weight, x.dtype), bias)

    def embed(self, token_ids: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
        return F.embedding(token_ids, self.unpack(weight, dtype))


ROWS8 = Rows8()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(layer: Any) -> dict[str, Tensor]:
    """Fill a layer through its views, as a loader does."""
    values = {view.name: random(*view.shape, seed=n) for n, view in enumerate(layer.weight_views())}
    for view in layer.weight_views():
        view.fill(values[view.name])
    return values


def plain_twin(layer: Any) -> Any:
    """The same layer with a dense matrix of the values that the other one stands for."""
    twin, matrix = copy.deepcopy(layer), layer.matrix
    values = matrix.data.to(torch.float32)
    if matrix.scales is not None:
        values = values * matrix.scales
    twin.scheme, twin.scales, twin.compute_dtype = dense(values).scheme, None, None
    setattr(twin, twin._name, torch.nn.Parameter(values, requires_grad=False))
    assert twin.matrix.is_plain(torch.float32)
    return twin


STORED = pytest.mark.parametrize(
    ("dtype", "scheme"),
    [(torch.bfloat16, dense(torch.ones(1, 1)).scheme), (torch.float32, ROWS8)],
    ids=["bfloat16", "rows8"],
)


@STORED
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_stored_matrices(dtype: torch.dtype, scheme: Scheme, bias: bool) -> None:
    layer = FusedLinear(("gate", "up"), SIZE, (24, 24), bias)
    layer.store_as(dtype, scheme)
    fill(layer)
    twin = plain_twin(layer)
    norm = RMSNorm(SIZE, 1e-5)
    norm.weight.data.copy_(random(SIZE, seed=8))
    for num_tokens in (1, 3, 20):
        x, stream = random(num_tokens, SIZE, seed=9), random(num_tokens, 48, seed=10)
        for call in (
            lambda made: made(x),  # noqa: B023
            lambda made: made.onto(x, stream.clone()),  # noqa: B023
            lambda made: made.of_norm(x, norm),  # noqa: B023
            lambda made: made.gated_of_norm(x, norm),  # noqa: B023
        ):
            found, wanted = call(layer), call(twin)
            assert found.dtype == wanted.dtype == torch.float32
            torch.testing.assert_close(found, wanted)


@STORED
def test_embeddings_and_logits_of_stored_matrices(dtype: torch.dtype, scheme: Scheme) -> None:
    embedding = Embedding(VOCAB, SIZE)
    embedding.store_as(dtype, scheme)
    fill(embedding)
    twin = plain_twin(embedding)
    ids = torch.tensor([3, 95, 0])
    assert torch.equal(embedding(ids), twin(ids))
    x = random(3, SIZE, seed=5)
    tied, tied_twin = (OutputHead(VOCAB, SIZE, table) for table in (embedding, twin))
    torch.testing.assert_close(tied(x), tied_twin(x))
    own = OutputHead(VOCAB, SIZE, None)
    own.store_as(dtype, scheme)
    fill(own)
    torch.testing.assert_close(own(x), plain_twin(own)(x))
    norms = RMSNorm(SIZE, 1e-5), RMSNorm(SIZE, 1e-5)
    for seed, norm in enumerate(norms, start=6):
        norm.weight.data.copy_(random(SIZE, seed=seed))
    joined = [table.joined(ids, norms[0], x, norms[1]) for table in (embedding, twin)]
    assert joined[0].dtype == torch.float32
    torch.testing.assert_close(*joined)


def test_a_value_follows_its_parameter() -> None:
    layer = FusedLinear(("fc",), 4, (3,), bias=False)
    first = layer.matrix
    assert layer.matrix is first and first.data is layer.weight
    layer.weight.data = torch.ones(3, 4)
    assert torch.equal(layer(torch.ones(1, 4)), torch.full((1, 3), 4.0))
    layer.to(torch.float64)
    assert layer(torch.ones(1, 4).double()).dtype == torch.float64
    layer.weight = torch.nn.Parameter(torch.zeros(3, 4))
    assert layer.matrix.data is layer.weight and not layer(torch.ones(1, 4)).any()
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.weight.grad is not None and bool((layer.weight.grad == 1).all())


def test_norms_and_biases_keep_the_dtype_of_computation() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = RMSNorm(4, 1e-5), FusedLinear(("fc",), 4, (3,), bias=True)

        def weight_views(self) -> Any:
            yield from self.fc.weight_views()

    device = DeviceConfig("cpu", "float64", "bfloat16", "float64")
    made = build(Both, device)
    found = {name: parameter.dtype for name, parameter in made.named_parameters()}
    assert found.pop("fc.weight") == torch.bfloat16
    assert set(found.values()) == {torch.float64}
    assert isinstance(made.fc, MatrixLayer)
    store_matrices_as(made, torch.float32)
    assert made.fc.weight.dtype == torch.float32


# ---- through the engine ----


def write_model(folder: Path, tied: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    sizes = {"q": SIZE, "k": SIZE // 2, "v": SIZE // 2, "o": SIZE}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, SIZE),
        "model.norm.weight": (SIZE,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, SIZE)
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        for name, rows in sizes.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, SIZE)
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (48, SIZE) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (SIZE, 48)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (SIZE,)
    tensors = {name: random(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    tensors = {name: t / t.shape[-1] ** 0.5 if t.dim() > 1 else t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("change", ["none", "dtype", "values", "shape"])
def test_a_tied_lm_head_that_is_stored_must_be_the_embedding(tmp_path: Path, change: str) -> None:
    """transformers would not tie them then, so the answers would be others."""
    folder = write_model(tmp_path / "tied", tied=True)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if change == "dtype":
        tensors["model.embed_tokens.weight"] = head.bfloat16()
        head = head.bfloat16().float()
    elif change == "values":
        head += 0.01
    elif change == "shape":
        head = head[:-1]
    save_file({**tensors, "lm_head.weight": head.contiguous()}, folder / "model.safetensors")
    if change in ("none", "dtype"):
        assert answers(folder)
        return
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from"):
        answers(folder)


def round_matrices(source: Path, folder: Path) -> Path:
    """The same model, its matrices rounded to bfloat16 and stored in float32."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    rounded = {n: t.bfloat16().float() if t.dim() > 1 else t for n, t in tensors.items()}
    assert any(not torch.equal(rounded[name], tensors[name]) for name in tensors)
    save_file(rounded, folder / "model.safetensors")
    return folder


def answers(folder: Path, **options: Any) -> list[tuple[list[int], list[float]]]:
    llm = LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **options)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": ids} for ids in ([4, 8, 15], list(range(20)))]
    found = []
    for each in llm.generate(prompts, params):
        completion = each.outputs[0]
        ids = list(completion.token_ids)
        chances = zip(ids, completion.logprobs or [], strict=True)
        found.append((ids, [table[token].logprob for token, table in chances]))
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("graph_mode", ["none", "step"])
def test_bfloat16_weights_are_rounded_weights_in_float32(
    tmp_path: Path, tied: bool, graph_mode: str
) -> None:
    whole = write_model(tmp_path / "whole", tied)
    rounded = round_matrices(whole, tmp_path / "rounded")
    found = answers(whole, weight_dtype="bfloat16", graph_mode=graph_mode)
    assert found == answers(rounded, graph_mode=graph_mode)  # bit for bit
    assert found != answers(whole, graph_mode=graph_mode)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads_keep_their_matrices_so_too(tmp_path: Path, method: str) -> None:
    """The toy's weights are exact in bfloat16 but for a few, so that its drafts stay right."""
    target = toy.write_target(tmp_path / "target")
    head = toy.write_head(tmp_path / "head", method)
    spec = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    llm = LLM(
        str(target),
        device="cpu",
        weight_dtype="bfloat16",
        skip_tokenizer_init=True,
        speculative_config=spec,
    )
    drafter = llm.engine.runner.speculator.head
    kinds = {p.dtype for p in drafter.parameters() if p.dim() > 1}
    assert kinds == {torch.bfloat16} and drafter.rotary.table.dtype == torch.float32
    params = SamplingParams(temperature=0, max_tokens=13)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 9, 17]}], params)
    wanted, token = [], 17
    for _ in range(13):
        wanted.append(token := toy.successor(token))
    assert list(answer.outputs[0].token_ids) == wanted
    assert llm.metrics()["spec_decode_num_accepted_tokens"] >= 9
