"""Reading safetensors folders, and refusing broken ones in one sentence."""

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
}


def write_sharded(folder: Path) -> None:
    weight_map = {}
    for index, (name, tensor) in enumerate(TENSORS.items()):
        file_name = f"model-{index}.safetensors"
        save_file({name: tensor}, folder / file_name)
        weight_map[name] = file_name
    index_text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_text)


def check_content(folder: Path) -> None:
    with WeightReader(folder) as reader:
        assert reader.names() == set(TENSORS)
        assert reader.shape("a.weight") == (3, 4)
        assert reader.total_bytes == 12 * 4 + 6 * 2
        for name, tensor in TENSORS.items():
            assert reader.tensor(name).dtype == tensor.dtype
            assert torch.equal(reader.tensor(name), tensor)


def test_single_file_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    check_content(tmp_path)


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    check_content(tmp_path)


def test_shards_without_index_are_found(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    check_content(tmp_path)


def test_tensors_stay_valid_after_close(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with WeightReader(tmp_path) as reader:
        tensor = reader.tensor("a.weight")
    assert torch.equal(tensor, TENSORS["a.weight"])


def test_small_types_are_counted_in_bytes(tmp_path: Path) -> None:
    tensors = {
        "eight": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "flag": torch.zeros(7, dtype=torch.bool),
        "long": torch.zeros(2, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert WeightReader(tmp_path).total_bytes == 5 + 7 + 16


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_reading_one_tensor_at_a_time_keeps_memory_flat(tmp_path: Path) -> None:
    tensor_bytes = 8 << 20
    tensors = {f"t{index}": torch.ones(tensor_bytes // 4) for index in range(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    gc.collect()
    with WeightReader(tmp_path) as reader:
        before = resident_bytes()
        total = sum(float(reader.tensor(name).sum()) for name in reader.names())
        grown = resident_bytes() - before
    assert total == 16 * tensor_bytes // 4
    assert grown < 4 * tensor_bytes


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors files: fetch"):
        WeightReader(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        WeightReader(tmp_path / "nowhere")


def test_pickled_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin\): convert them"):
        WeightReader(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is missing though"):
        WeightReader(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 40, -3])
def test_a_truncated_shard_is_named(tmp_path: Path, kept: int) -> None:
    write_sharded(tmp_path)
    shard = tmp_path / "model-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors is truncated or damaged"):
        WeightReader(tmp_path)


def test_a_corrupt_header_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[8:20] = b"not json....".ljust(12)
    (tmp_path / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        WeightReader(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"a.weight"', '"c.weight"'))
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'c\.weight'"):
        WeightReader(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": []}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is not a valid index"):
        WeightReader(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors")
    save_file(TENSORS, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="remove one of the two files"):
        WeightReader(tmp_path)


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with WeightReader(tmp_path) as reader:
        with pytest.raises(CheckpointError, match="holds no tensor 'z'"):
            reader.tensor("z")
        with pytest.raises(CheckpointError, match="holds no tensor 'z'"):
            reader.shape("z")


@pytest.mark.parametrize(
    "name",
    ["../model-0.safetensors", "{root}/model-0.safetensors", "sub/../model-0.safetensors",
     "./model-0.safetensors", "..", ".", "", "a\\b.safetensors", "a\0b"],
)  # fmt: skip
def test_an_index_may_only_name_files_of_its_folder(tmp_path: Path, name: str) -> None:
    """The file that each name leads to exists, so that following it would succeed."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    write_sharded(folder)
    write_sharded(tmp_path)
    name = name.replace("{root}", str(tmp_path))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": name}}))
    message = "is not a file name in its own folder|is missing though"
    with pytest.raises(CheckpointError, match=message):
        WeightReader(folder)


def test_files_that_are_links_are_read(tmp_path: Path) -> None:
    """The hub's cache keeps files apart from the folders that show them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_sharded(snapshot)
    for file in list(snapshot.iterdir()):
        blob = file.rename(blobs / f"blob-{file.name}")
        file.symlink_to(Path("../../blobs") / blob.name)
    check_content(snapshot)
