"""Heads that come with stoop: how one is put there, and that those that are there fit."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

import ship_head
from stoop.checkpoint import shipped
from stoop.checkpoint.fetch import resolve_model
from stoop.checkpoint.fingerprint import take_fingerprint
from stoop.checkpoint.shipped import SHIPPED, acceptance_lengths, shipped_head
from stoop.checkpoint.toy import write_target
from stoop.checkpoint.weights import WeightReader
from stoop.models.decoder_gguf import LAYER_NAMES, OUTER_NAMES


def row(
    k: int, length: float, temperature: float = 0, questions: str = "a.jsonl"
) -> dict[str, Any]:
    rates = [(length - 1) / k] * k
    return {
        **{"questions": questions, "temperature": temperature, "k": k},
        **{"mean_acceptance_length": length, "acceptance_rates": rates},
    }


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A head as `train-draft` leaves it, and what was measured."""
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_bytes(b"weights")
    (head / "config.json").write_text("{}")
    (head / "README.md").write_text("# A head\n")
    return tmp_path


def measure(folder: Path, rows: list[dict[str, Any]]) -> Path:
    record = {
        **{"dtype": "bfloat16", "device": "a GPU", "max_tokens": 256, "rows": rows},
        "speculative_config": {"draft_sample_method": "coupled"},
    }
    path = folder / "acceptance.json"
    path.write_text(json.dumps(record))
    return path


def test_a_head_is_shipped(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(k, 1 + k / 4, questions=name) for name in ("a", "b") for k in (1, 2, 3, 4)]
    rows += [row(2, 2.5, questions="c"), row(1, 9.0, temperature=1)]
    target = write_target(made / "target")
    folder = ship_head.ship(made / "head", made / "heads", "small", [measure(made, rows)], target)
    monkeypatch.setitem(shipped.SHIPPED, "small", made / "heads" / "small")
    assert shipped_head(target) == folder
    assert acceptance_lengths(folder) == [
        1.25,
        pytest.approx((1.5 + 1.5 + 2.5) / 3, abs=1e-3),
        1.75,
    ]
    card = (folder / "README.md").read_text()
    assert card.startswith("# A head") and "| c | 0 | 2 | 2.50 | 0.75 0.75 |" in card


def test_what_is_not_measured_is_not_shipped(made: Path) -> None:
    few = [measure(made, [row(1, 1.5)])]
    with pytest.raises(SystemExit, match="K = 2, 3 are missing"):
        ship_head.ship(made / "head", made / "heads", "small", few, made)
    (made / "head" / "model.safetensors").write_bytes(bytes(ship_head.MAX_BYTES + 1))
    rows = [row(k, 1.5) for k in (1, 2, 3)]
    with pytest.raises(SystemExit, match="larger than 25 MB"):
        ship_head.ship(made / "head", made / "heads", "small", [measure(made, rows)], made)


@pytest.mark.parametrize("name", [name for name in SHIPPED if SHIPPED[name].exists()])
def test_what_is_there_is_whole(name: str) -> None:
    folder = SHIPPED[name]
    assert shipped._is_whole(folder), "files are missing"
    assert (folder / "model.safetensors").stat().st_size <= ship_head.MAX_BYTES
    assert (folder / "README.md").is_file()
    lengths = acceptance_lengths(folder)
    assert len(lengths) == 3 and 1 < lengths[0] < lengths[1] < lengths[2] < 4


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve_model("smollm2-135m")


@pytest.mark.model
def test_the_fingerprint_is_that_of_the_target(smollm2: Path) -> None:
    """As `tools/ship_head.py --fingerprint` writes it."""
    shipped_file = SHIPPED["smollm2-135m"] / shipped.FINGERPRINT
    assert json.loads(shipped_file.read_text()) == take_fingerprint(smollm2)


@pytest.mark.model
def test_the_head_is_found_for_any_copy_of_its_target(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = SHIPPED["smollm2-135m"]
    assert shipped_head(smollm2) == head
    with WeightReader(smollm2) as reader:
        half = {name: reader.tensor(name).bfloat16() for name in reader.names()}
    # As the hub has it: bfloat16, and a config in the words of another version.
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    save_file(half, folder / "model.safetensors")
    config = json.loads((smollm2 / "config.json").read_text())
    for key in ("rope_theta", "head_dim", "torch_dtype"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert shipped_head(folder) == head
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))
    file = write_smollm2_gguf(tmp_path / "my copy.gguf", config, half)
    converted = resolve_model(str(file))
    assert converted.is_relative_to(tmp_path / "cache")
    assert shipped_head(converted) == head
    # One norm that moved by one step of bfloat16, as training does, is another model.
    half["model.norm.weight"][0] = 1.765625
    save_file(half, folder / "model.safetensors")
    assert shipped_head(folder) is None


def write_smollm2_gguf(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Path:
    """The weights under llama.cpp's names, a few matrices as Q4_0, to be quick.

    It would also reorder the rows of q and k, at which the fingerprint does not look.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b"])
    kind = gguf.GGMLQuantizationType.Q4_0
    names = {new: old for old, new in {**OUTER_NAMES, **LAYER_NAMES}.items()}
    for name, tensor in tensors.items():
        if name in names:
            stored = names[name]
        else:
            _, _, layer, part, *rest = name.removesuffix(".weight").split(".")
            stored = f"blk.{layer}.{names['.'.join([part, *rest])]}.weight"
        if tensor.dim() == 1:
            writer.add_tensor(stored, tensor.float().numpy())
        elif name.endswith(("v_proj.weight", "down_proj.weight")):
            writer.add_tensor(
                stored, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind
            )
        else:
            writer.add_tensor(stored, tensor.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
