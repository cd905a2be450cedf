"""GGUF files of hybrid models become the folders that transformers would write."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from stoop.checkpoint.gguf import convert_gguf
from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError
from stoop.models.registry import read_model_spec
from support.checkpoints import make_model
from support.engines import make_llm
from support.huggingface import greedy_params, make_prompt
from support.hybrid_gguf_files import write_hybrid_gguf

MODELS = ("lfm2", "granite-hybrid", "granite-groups")
Q8, Q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))


def folder_of(path: Path, name: str) -> Path:
    """What transformers writes."""
    make_model(name, 0).float().save_pretrained(path / name)
    return path / name


def values(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with WeightReader(folder) as reader:
        for name in sorted(reader.names()):
            yield name, reader.tensor(name)


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    model, wanted = make_model(name, 0).float(), folder_of(tmp_path, name)
    convert_gguf(write_hybrid_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    for (found, ours), (expected, theirs) in zip(
        values(tmp_path / "out"), values(wanted), strict=True
    ):
        assert found == expected
        if found.endswith("A_log"):  # through an exponential and back
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        else:
            assert torch.equal(ours, theirs), found
    spec = read_model_spec(wanted)
    rotates = name != "granite-hybrid"
    ours = read_model_spec(tmp_path / "out")
    assert ours.max_position == (512 if rotates else 131_072)
    assert replace(
        ours, max_position=spec.max_position, bos_token_id=1, eos_token_ids=spec.eos_token_ids
    ) == replace(spec, bos_token_id=1)


def logprobs(source: Path, **options: Any) -> tuple[list[list[int]], np.ndarray]:
    """Greedy answers, and the log-probability of each of their tokens."""
    settings = {"max_model_len": 128, "dtype": "float32"} | options
    llm = make_llm(source, **settings)
    prompts = [make_prompt(length) for length in (1, 17, 70)]
    outputs = llm.generate(prompts, greedy_params(8, logprobs=0), use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    rows = [
        [row[t].logprob for row, t in zip(a.logprobs, a.token_ids, strict=True)] for a in answers
    ]
    return [answer.token_ids for answer in answers], np.array(rows)


@pytest.mark.parametrize("name", ["lfm2", "granite-hybrid"])
def test_answers_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    file = write_hybrid_gguf(tmp_path / "m.gguf", make_model(name, 0).float())
    ids, scores = logprobs(file, weights="dense")
    wanted, due = logprobs(folder_of(tmp_path, name))
    assert ids == wanted
    np.testing.assert_allclose(scores, due, atol=1e-4)


@pytest.mark.parametrize(("up", "packed"), [(Q8, True), (Q8, False), (Q4, True)])
def test_gate_and_up_are_one_matrix(
    tmp_path: Path, up: gguf.GGMLQuantizationType, packed: bool
) -> None:
    """Blocks of one type stay as they are; of two types, both are dequantised."""
    file = write_hybrid_gguf(
        tmp_path / "m.gguf",
        make_model("granite-hybrid", 0).float(),
        kind_of=lambda name: up if "ffn_up" in name else Q8,
    )
    convert_gguf(file, tmp_path / "out", packed=packed)
    convert_gguf(file, tmp_path / "dense")
    name = "model.layers.0.shared_mlp.input_linear.weight"
    with WeightReader(tmp_path / "out") as reader, WeightReader(tmp_path / "dense") as dense:
        kept = reader.quantized(name)
        assert (kept is not None) == (packed and up == Q8)
        found = reader.tensor(name)
        assert torch.equal(found, dense.tensor(name))
        matrix = make_model("granite-hybrid", 0).model.layers[0].shared_mlp.input_linear.weight
        assert found.shape == matrix.shape
        torch.testing.assert_close(found.double(), matrix.detach(), rtol=0, atol=0.08)


def assert_refused(path: Path, name: str, message: str, **options: Any) -> None:
    file = write_hybrid_gguf(path / "m.gguf", make_model(name, 0).float(), **options)
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(file, path / "out")
    assert not (path / "out").exists()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lfm2", "blk.0.shortconv.conv.weight"),
        ("lfm2", "blk.1.attn_q_norm.weight"),
        ("granite-hybrid", "blk.2.ssm_a"),
        ("granite-hybrid", "blk.0.ssm_dt.bias"),
        ("granite-hybrid", "blk.1.attn_k.weight"),
        ("granite-hybrid", "blk.1.ffn_gate.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, tensor: str) -> None:
    assert_refused(
        tmp_path, name, rf"lacks the tensor '{tensor}'", edit=lambda tensors: tensors.pop(tensor)
    )


def test_experts_are_refused(tmp_path: Path) -> None:
    message = "mixture-of-experts models cannot be loaded: use a dense model"
    experts = np.zeros((2, 4, 4), dtype=np.float32)
    assert_refused(
        tmp_path,
        "granite-hybrid",
        message,
        edit=lambda tensors: tensors.update({"blk.0.ffn_up_exps.weight": experts}),
        more=lambda writer: writer.add_expert_count(2),
    )


def test_half_rotated_heads_are_refused(tmp_path: Path) -> None:
    """As in files of Bamba: llama.cpp's order of rows does not fit a part of a head."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("granitehybrid.rope.dimension_count")
        writer.add_rope_dimension_count(8)

    assert_refused(tmp_path, "granite-groups", "rotates 8 of 16 dimensions", more=add)


def test_a_growing_state_is_refused(tmp_path: Path) -> None:
    message = "ssm_a that is not negative: download it again"
    file = write_hybrid_gguf(
        tmp_path / "m.gguf",
        make_model("granite-hybrid", 0).float(),
        edit=lambda tensors: tensors["blk.0.ssm_a"].fill(0.5),
    )
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(file, tmp_path / "out")


def test_too_few_layers_with_kv_heads_are_refused(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("lfm2.attention.head_count_kv")
        writer.add_head_count_kv([0, 2])

    assert_refused(tmp_path, "lfm2", "KV heads of 2 layers, but more layers", more=add)


def test_converted_config_names_the_layers(tmp_path: Path) -> None:
    file = write_hybrid_gguf(tmp_path / "m.gguf", make_model("lfm2", 0).float())
    convert_gguf(file, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["layer_types"] == ["conv", "full_attention", "conv", "conv"]
    assert config["num_key_value_heads"] == 2
