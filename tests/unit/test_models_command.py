"""`stoop models`: what is cached is listed with its size, and removed whole or not at all."""

import errno
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from typer.testing import CliRunner, Result

# Families bring the layouts of their GGUF files.
import stoop.models.registry
from stoop.checkpoint import cache, inventory
from stoop.checkpoint.fetch import resolve_model
from stoop.cli.main import app
from stoop.config.errors import ConfigError, FetchError
from support.gguf_files import write_tiny_gguf
from support.hub_cache import put_into_cache

INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of stoop and one of the hub library, not yet made."""
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "stoop"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # for children
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def converted(caches: Path) -> str:
    """The name of a converted file."""
    return resolve_model(write_tiny_gguf(caches / "my model.gguf")).name


@pytest.fixture
def leftover(caches: Path) -> Path:
    """What a process left that was killed while it made a model called killed."""
    folder = caches / "stoop" / "models" / ".making-killed-ab_c1234"
    (folder / "scratch").mkdir(parents=True)
    (folder / "scratch" / "part").write_bytes(bytes(3_000_000))
    return folder


def stoop(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


def test_an_empty_cache_says_where_it_is(caches: Path) -> None:
    result = stoop()
    assert result.exit_code == 0
    assert (
        result.output == f"no models are cached (stoop: {caches}/stoop/models, hub: {caches}/hub)\n"
    )
    assert not (caches / "stoop").exists()


def test_what_is_cached_is_listed_with_sizes(caches: Path, converted: str, leftover: Path) -> None:
    put_into_cache(caches / "hub", {"config.json": b"{}", "model.safetensors": bytes(5_000_000)})
    lines = stoop().output.splitlines()
    rows = [line.split(None, 3) for line in lines[1:-1]]
    assert rows == [
        [converted, "1", "MB", f"stoop, from {caches}/my model.gguf"],
        ["killed", "3", "MB", "stoop, unfinished"],
        ["org/name", "6", "MB", "hub"],
    ]
    assert lines[0].split() == ["NAME", "SIZE", "PLACE"]
    assert lines[-1].startswith("9 MB in total") or lines[-1].startswith("10 MB in total")


def test_a_damaged_folder_and_one_that_is_being_made_are_marked(
    caches: Path, converted: str, leftover: Path
) -> None:
    (caches / "stoop" / "models" / converted / "config.json").unlink()
    with cache.lock_if_free("killed") as is_free:
        assert is_free
        notes = {model.name: model.note for model in inventory.list_models()}
    assert notes["killed"] == "being made by another process"
    assert notes[converted].startswith("damaged")


@pytest.mark.parametrize(
    ("files", "partial", "note"),
    [
        ({"config.json": b"{}", "model.safetensors": b"x"}, False, ""),
        ({"config.json": b"{}", "model.safetensors": b"x"}, True, "unfinished"),
        ({"model.safetensors.index.json": INDEX.encode(), "model-1.safetensors": b""}, False,
         "unfinished"),
        ({"model.safetensors.index.json": b"{"}, False, "unfinished"),
        ({}, True, "unfinished"),
    ],
)  # fmt: skip
def test_unfinished_hub_models_are_marked(
    caches: Path, files: dict[str, bytes], partial: bool, note: str
) -> None:
    folder = put_into_cache(caches / "hub", files)
    if partial:
        (folder / "blobs" / "abc.incomplete").write_bytes(bytes(2_000_000))
    (model,) = inventory.list_models()
    assert (model.name, model.place, model.note) == ("org/name", "hub", note)
    assert model.num_bytes == sum(map(len, files.values())) + 2_000_000 * partial
    inventory.remove_models([model])
    assert inventory.list_models() == [] and not folder.exists()


def test_one_model_is_removed_and_the_others_stay(
    caches: Path, converted: str, leftover: Path
) -> None:
    put_into_cache(caches / "hub", {"config.json": b"{}"})
    (caches / "hub" / ".locks" / "models--org--name").mkdir(parents=True)
    assert stoop("rm", converted, "--yes").output == f"removed {converted} (1 MB)\n"
    assert [model.name for model in inventory.list_models()] == ["killed", "org/name"]
    assert stoop("rm", "org/name", "killed", "-y").exit_code == 0
    assert inventory.list_models() == [] and not leftover.exists()
    assert list((caches / "hub" / ".locks").iterdir()) == []


def test_a_conversion_is_removed_by_its_file_too(caches: Path, converted: str) -> None:
    (caches / "my model.gguf").unlink()  # which need not be there any more
    assert stoop("rm", str(caches / "my model.gguf"), "--yes").exit_code == 0
    assert inventory.list_models() == []


def test_a_name_that_is_not_cached_is_refused_and_nothing_removed(converted: str) -> None:
    result = stoop("rm", converted, "elsewhere", "--yes")
    assert isinstance(result.exception, ConfigError)
    assert "no model called 'elsewhere' is cached" in str(result.exception)
    assert len(inventory.list_models()) == 1


def test_without_a_terminal_it_has_to_be_told(converted: str) -> None:
    result = stoop("rm", converted)
    assert isinstance(result.exception, ConfigError) and "add --yes" in str(result.exception)
    assert len(inventory.list_models()) == 1


@pytest.mark.parametrize(("answer", "num_left"), [("n", 1), ("", 1), ("y", 0)])
def test_it_asks_on_a_terminal(converted: str, answer: str, num_left: int) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    command = "from stoop.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "models", "rm", converted],
        stdin=theirs, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert f"remove {converted} (1 MB" in done.stdout + done.stderr
    assert len(inventory.list_models()) == num_left


def test_what_is_being_made_is_not_removed(leftover: Path) -> None:
    with cache.lock_if_free("killed"):
        (model,) = inventory.list_models()
        with pytest.raises(FetchError, match="killed is being downloaded or converted by another"):
            inventory.remove_models([model])
    assert leftover.exists()


def test_a_cache_that_may_not_be_changed_is_told(
    converted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(cache.tempfile, "mkdtemp", refuse)
    result = stoop("rm", converted, "--yes")
    assert isinstance(result.exception, FetchError)
    assert "cannot be removed" in str(result.exception)
    assert len(inventory.list_models()) == 1


PULL = """
import sys
from pathlib import Path
from stoop.checkpoint import cache, fetch
from stoop.cli.pull import pull

def build(scratch, model):
    (scratch / "part").write_bytes(bytes(1000))
    print("begun", flush=True)
    sys.stdin.read()

def fetch_slowly(name, report=None, packed=False):
    recipe = cache.Recipe(name, "x", lambda: 0, build, lambda: "")
    return cache.obtain(recipe, report)

fetch.pull = fetch_slowly
pull("slow")
"""


@pytest.mark.parametrize(
    ("number", "left"),
    [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGKILL, 1)],
)
def test_an_interrupted_pull_leaves_nothing(caches: Path, number: int, left: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PULL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    child.send_signal(number)
    child.communicate(timeout=60)
    assert child.returncode != 0
    found = inventory.list_models()
    # No process can clean up after SIGKILL; what it left is shown, and can be removed.
    assert [(model.name, model.note) for model in found] == [("slow", "unfinished")] * left
    if found:
        assert stoop("rm", "slow", "--yes").exit_code == 0
    assert not list((caches / "stoop" / "models").glob(".making-*"))
