"""The same weights are known in any number format, and other weights are not taken for them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stoop.checkpoint.fetch import resolve_model
from stoop.checkpoint.fingerprint import matches, take_fingerprint
from stoop.checkpoint.gguf import convert_gguf
from support.checkpoints import edit_json, save_checkpoint
from support.gguf_files import random_tensors, write_gguf

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder converted from a float32 GGUF file, its norms as bfloat16 has them."""
    folder = tmp_path_factory.mktemp("base")
    convert_gguf(write_gguf(folder / "m.gguf", tensors_of_bfloat16()), folder / "model")
    return folder / "model"


def tensors_of_bfloat16() -> dict[str, np.ndarray]:
    return {
        name: torch.from_numpy(values).bfloat16().float().numpy()
        for name, values in random_tensors().items()
    }


@pytest.fixture(scope="module")
def fingerprint(base: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(json.dumps(take_fingerprint(base)))
    assert len(json.dumps(kept)) < 20_000
    return kept


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_1", "Q4_0"])
def test_a_gguf_file_of_any_quantisation_is_known(
    fingerprint: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    write_gguf(file, tensors_of_bfloat16(), kind=gguf.GGMLQuantizationType[kind])
    assert matches(fingerprint, resolve_model(file))


def test_a_fingerprint_of_a_quantised_file_knows_the_others(base: Path, tmp_path: Path) -> None:
    source = write_gguf(
        tmp_path / "m.gguf", tensors_of_bfloat16(), kind=gguf.GGMLQuantizationType.Q4_1
    )
    convert_gguf(source, tmp_path / "q4_1")
    assert matches(take_fingerprint(tmp_path / "q4_1"), base)
    source = write_gguf(
        tmp_path / "n.gguf", tensors_of_bfloat16(), kind=gguf.GGMLQuantizationType.Q4_0
    )
    convert_gguf(source, tmp_path / "q4_0")
    assert matches(take_fingerprint(tmp_path / "q4_1"), tmp_path / "q4_0")


def resave(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    shutil.copy(source / "config.json", target)
    return target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_folder_of_another_type_is_known(
    base: Path, fingerprint: dict[str, Any], tmp_path: Path, dtype: torch.dtype
) -> None:
    def cast(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    folder = resave(base, tmp_path / "copy", cast)
    # Configs of other versions leave out what follows from the rest.
    edit_json(folder / "config.json", num_key_value_heads=None, head_dim=None, torch_dtype=None)
    assert matches(fingerprint, folder)


def test_a_folder_in_several_files_is_known(
    base: Path, fingerprint: dict[str, Any], tmp_path: Path
) -> None:
    folder = resave(base, tmp_path / "copy", lambda tensors: None)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, folder / "one.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, folder / "two.safetensors")
    assert matches(fingerprint, folder)


def move_a_norm(tensors: Tensors) -> None:
    """By one step of bfloat16, as the smallest change that training can make."""
    norm = tensors["model.norm.weight"]
    norm[0] = torch.nextafter(norm[0].bfloat16(), torch.tensor(9.0, dtype=torch.bfloat16)).float()


def change_a_matrix(tensors: Tensors) -> None:
    weight = tensors["model.layers.1.mlp.down_proj.weight"]
    weight += 0.4 * torch.randn_like(weight)


def permute_the_vocabulary(tensors: Tensors) -> None:
    weight = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = weight.roll(1, dims=0)


def draw_all_matrices(tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = torch.randn(tensor.shape, generator=generator)


def spoil_with_nan(tensors: Tensors) -> None:
    tensors["model.norm.weight"].fill_(float("nan"))


def lose_a_tensor(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def shrink_a_tensor(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


@pytest.mark.parametrize(
    "change",
    [move_a_norm, change_a_matrix, permute_the_vocabulary, draw_all_matrices, spoil_with_nan,
     lose_a_tensor, shrink_a_tensor],
)  # fmt: skip
def test_other_weights_of_the_same_shape_are_not_known(
    base: Path, fingerprint: dict[str, Any], tmp_path: Path, change: Callable[[Tensors], object]
) -> None:
    torch.manual_seed(0)
    assert not matches(fingerprint, resave(base, tmp_path / "copy", change))


def test_a_small_change_of_matrices_alone_is_not_seen(
    base: Path, fingerprint: dict[str, Any], tmp_path: Path
) -> None:
    """The limit of the method: as much as quantising changes, such as a merged adapter."""

    def adapt(tensors: Tensors) -> None:
        torch.manual_seed(0)
        for tensor in tensors.values():
            if tensor.dim() == 2:
                tensor += 0.05 * tensor.std() * torch.randn_like(tensor)

    assert matches(fingerprint, resave(base, tmp_path / "copy", adapt))


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "num_attention_heads"])
def test_other_sizes_are_told_without_reading_weights(
    base: Path, fingerprint: dict[str, Any], tmp_path: Path, key: str
) -> None:
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: 1}))
    (tmp_path / "model.safetensors").write_bytes(b"not looked at")
    assert not matches(fingerprint, tmp_path)


def test_another_model_is_not_known(fingerprint: dict[str, Any], tmp_path: Path) -> None:
    assert not matches(fingerprint, save_checkpoint(tmp_path / "other", "smollm2"))


@pytest.mark.parametrize("config", [None, "{", "[]", "[" * 100_000])
def test_a_broken_folder_is_not_known(
    fingerprint: dict[str, Any], tmp_path: Path, config: str | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert not matches(fingerprint, tmp_path)
