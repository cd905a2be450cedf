"""Packed weights on disk: written once, mapped by later starts, made again when they are stale."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stoop import LLM, SamplingParams
from stoop.checkpoint import embedded
from stoop.checkpoint.embedded import PACKED_SUFFIX
from stoop.checkpoint.fetch import converted_name, resolve_model
from stoop.checkpoint.fingerprint import matches, take_fingerprint
from stoop.checkpoint.weights import WeightReader
from stoop.cli.main import app
from stoop.models import packed_weights
from stoop.models.packed_weights import FILE
from support.engines import make_llm
from support.packed_models import one_kind, write_packable_gguf

pytestmark = pytest.mark.usefixtures("native")

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))
    return write_packable_gguf(tmp_path / "my model.gguf")


def start(file: Path, **options: Any) -> LLM:
    return make_llm(file, **{"dtype": "float32", "max_model_len": 64, **options})


def answer(llm: LLM) -> list[int]:
    return list(llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids)


def folder_of(llm: LLM) -> Path:
    return Path(llm.config.load.folder)


def state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def test_a_second_start_maps_the_file(file: Path) -> None:
    first = start(file)
    assert folder_of(first).name == converted_name(file, packed=True)
    path = folder_of(first) / FILE
    before, expected = state(path), answer(first)
    model: Any = first.engine.runner.model
    packed = {name: p.clone() for name, p in model.named_parameters()}
    del first, model
    second = start(file)
    assert state(path) == before
    model = second.engine.runner.model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), packed[name].view(torch.uint8)), name
        address, lines = parameter.data_ptr(), Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in lines if line.endswith(f"/{FILE}")]
        assert any(int(a, 16) <= address < int(b, 16) for a, b in ranges), f"{name} is a copy"
    assert answer(second) == expected


def test_a_start_reads_back_what_was_packed(file: Path) -> None:
    assert answer(start(file)) == answer(start(file)) == answer(start(file, weights="dense"))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _garble(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def _no_metadata(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file(load_file(path), path)


def _other_version(path: Path) -> None:
    _rewrite(path, lambda origin: origin | {"version": -1})


def _other_source(path: Path) -> None:
    _rewrite(path, lambda origin: origin | {"source": "another file 1 2"})


def _not_json(path: Path) -> None:
    _rewrite(path, lambda origin: "{")


def _a_tensor_less(path: Path) -> None:
    _rewrite(path, lambda origin: origin, drop=1)


def _rewrite(path: Path, change: Any, drop: int = 0) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, framework="pt") as opened:
        origin = json.loads(opened.metadata()[packed_weights.KEY])
    changed = change(origin)
    text = changed if isinstance(changed, str) else json.dumps(changed)
    tensors = dict(list(load_file(path).items())[drop:])
    save_file(tensors, path, metadata={packed_weights.KEY: text})


@pytest.mark.parametrize(
    "harm",
    [_truncate, _empty, _garble, _no_metadata, _other_version, _other_source, _not_json,
     _a_tensor_less],
)  # fmt: skip
def test_a_damaged_or_stale_file_is_made_again(file: Path, harm: Any) -> None:
    first = start(file)
    path, expected = folder_of(first) / FILE, answer(first)
    good = path.read_bytes()
    del first
    harm(path)
    assert path.read_bytes() != good
    assert answer(start(file)) == expected
    assert path.read_bytes() == good
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_a_changed_gguf_file_is_packed_again(file: Path) -> None:
    """Of the same size: a fine-tune of the same model."""
    first = answer(start(file))
    size = file.stat().st_size
    write_packable_gguf(file, seed=9)
    assert file.stat().st_size == size
    second = answer(start(file))
    assert second != first and second == answer(start(file, weights="dense"))


def test_a_start_does_not_save_for_weights_that_replaced_its_own(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GGUF file changes, and another process converts it, while this one packs the old."""
    save, raced = packed_weights.save, []

    def late(module: Any, folder: Path, origin: Any) -> None:
        if not raced:
            raced.append(True)
            write_packable_gguf(file, seed=9)
            resolve_model(str(file), packed=True)
        save(module, folder, origin)

    monkeypatch.setattr("stoop.models.loader.save", late)
    first = start(file)
    assert (folder_of(first) / FILE).is_file()
    assert answer(start(file)) == answer(start(file, weights="dense")) != answer(first)


@pytest.mark.parametrize("how", ["mkdtemp", "full"])
def test_a_folder_that_cannot_be_written(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Every start packs again; a full disk is no reason to fail either."""
    from safetensors import SafetensorError

    def refuse(*_: Any, **__: Any) -> None:
        if how == "full":
            raise SafetensorError("Error while serializing: I/O error: No space left on device")
        raise OSError(30, "Read-only file system")

    resolve_model(str(file), packed=True)
    target = "safetensors.torch.save_file" if how == "full" else "tempfile.TemporaryDirectory"
    monkeypatch.setattr(target, refuse)
    caplog.set_level(logging.INFO)
    first, second = start(file), start(file)
    assert answer(first) == answer(second)
    assert not (folder_of(first) / FILE).exists()
    assert "cannot be written" in caplog.text and "packs weights again" in caplog.text
    assert [p.name for p in folder_of(first).iterdir() if p.name.startswith(".")] == []


def test_two_processes_at_once(file: Path) -> None:
    code = f"""
from support.engines import make_llm
from stoop import SamplingParams
llm = make_llm({str(file)!r}, dtype="float32", max_model_len=64, weights="packed")
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
print(list(llm.generate([{PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids))
"""
    native_cache = Path(os.environ["STOOP_CACHE"]) / "native"
    from stoop.ops.native.build import library_path

    native_cache.mkdir(parents=True)
    shutil.copy(library_path(), native_cache)  # children compile nothing
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=120)[0].strip() for child in children]
    expected = str(answer(start(file)))
    assert outputs == [expected, expected]


def test_two_engines_in_two_threads(file: Path) -> None:
    """They start together, write one file, and answer at the same time."""
    answers: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        llm = start(file)
        answers[number] = [answer(llm) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = answer(start(file))
    assert answers == {0: [expected] * 4, 1: [expected] * 4}
    path = Path(resolve_model(str(file), packed=True))
    assert [p.name for p in path.iterdir() if p.name.startswith(".")] == []


def test_weights_that_were_mapped_are_not_changed(file: Path) -> None:
    """An engine that runs keeps its weights when the model is removed or converted again."""
    start(file)
    llm = start(file)
    expected = answer(llm)
    shutil.rmtree(folder_of(llm))
    assert answer(llm) == expected


# ---- the conversions of a model ----


def models(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["models", *arguments])


def test_both_conversions_are_listed_and_removed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    answer(start(file))
    answer(start(file, weights="dense"))
    names = {converted_name(file, packed) for packed in (False, True)}
    listed = models().output
    assert all(f"{name} " in listed for name in names)
    assert listed.count(f"from {file}") == 2
    result = models("rm", "--yes", str(file))
    assert result.exit_code == 0, result.output
    assert models().output.startswith("no models are cached")


def test_an_embedded_model_is_removed_with_both_conversions(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoop.checkpoint import inventory
    from stoop.checkpoint.cache import models_dir

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for suffix in ("", PACKED_SUFFIX):
        (models_dir() / f"smollm2-135m{suffix}").mkdir(parents=True)
    found = {model.name for model in inventory.find_models("smollm2-135m")}
    assert found == {"smollm2-135m", f"smollm2-135m{PACKED_SUFFIX}"}


@pytest.mark.parametrize("packs", [True, False])
def test_pull_fetches_what_a_start_needs(monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    asked = []

    def pull(name: str, **options: Any) -> Path:
        asked.append((name, options["packed"]))
        return Path("/folder")

    monkeypatch.setattr("stoop.checkpoint.fetch.pull", pull)
    monkeypatch.setattr("stoop.engine.choose_weights.find_native", lambda _=None: packs or None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("smollm2-135m", "org/name"):
        result = CliRunner().invoke(app, ["pull", name])
        assert result.exit_code == 0, result.output
    assert asked == [("smollm2-135m", packs), ("org/name", False)]


def test_a_fingerprint_matches_every_conversion(file: Path) -> None:
    """The head that ships for a model is found whether its weights are packed or not."""
    dense, packed = (resolve_model(str(file), packed=packed) for packed in (False, True))
    for fingerprint in (take_fingerprint(dense), take_fingerprint(packed)):
        assert matches(fingerprint, dense) and matches(fingerprint, packed)
    other = write_packable_gguf(file.with_name("other.gguf"), seed=3)
    assert not matches(take_fingerprint(dense), resolve_model(str(other), packed=True))


def test_a_reader_dequantises_what_it_reads(file: Path) -> None:
    dense, packed = (resolve_model(str(file), packed=packed) for packed in (False, True))
    with WeightReader(dense) as ours, WeightReader(packed) as theirs:
        assert ours.names() == theirs.names()
        assert theirs.total_bytes < ours.total_bytes / 3
        for name in ours.names():
            assert ours.shape(name) == theirs.shape(name)
            assert torch.equal(ours.tensor(name), theirs.tensor(name)), name
            if len(ours.shape(name)) == 2:
                assert torch.equal(ours.rows(name, [3, 0]), theirs.rows(name, [3, 0]))


def test_disk_space_is_asked_for_what_is_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = embedded.EMBEDDED["smollm2-135m"]
    assert entry.written_bytes(packed=True) < entry.written_bytes(packed=False) / 4
    from stoop.checkpoint.gguf import converted_bytes

    for packed in (False, True):
        written = (resolve_model(str(file), packed=packed) / "model.safetensors").stat().st_size
        assert 0 <= written - converted_bytes(file, packed) < 20_000  # the header


def test_files_of_other_quantisations_are_mixed(file: Path, tmp_path: Path) -> None:
    """A matrix of a type that has no packed format is dequantised, alone."""
    other = write_packable_gguf(tmp_path / "other.gguf", one_kind("Q4_1"), seed=2)
    llm = start(other)
    model: Any = llm.engine.runner.model
    assert {m.scheme.name for m in model.modules() if hasattr(m, "scheme")} == {"Q4_1"}
