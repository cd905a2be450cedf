"""Models from the hub: what is downloaded, what is said before, and what is left of a failure."""

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from stoop.checkpoint import hub
from stoop.checkpoint.fetch import pull, resolve_model
from stoop.config.errors import FetchError
from support.hub_cache import COMMIT, put_into_cache


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a hub that is out of reach unless a test says otherwise."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))

    def out_of_reach(*_: Any, **__: Any) -> None:
        raise hub_errors.OfflineModeIsEnabled("no network in tests")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", out_of_reach)
    return folder


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The hub library answers with a folder; the calls made to it."""
    calls: list[dict[str, Any]] = []
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()

    def download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_hub_id_is_downloaded(snapshot: list[dict[str, Any]], tmp_path: Path) -> None:
    assert resolve_model("org/name", revision="abc") == tmp_path
    assert pull("org/name") == tmp_path
    assert [call["repo_id"] for call in snapshot] == ["org/name"] * 2
    assert snapshot[0]["revision"] == "abc"
    assert "*.safetensors" in snapshot[0]["allow_patterns"]
    assert not any(pattern.endswith(".bin") for pattern in snapshot[0]["allow_patterns"])


def test_hub_progress_is_told_in_bytes(snapshot: list[dict[str, Any]]) -> None:
    told: list[tuple[str, int, int | None]] = []
    pull("org/name", report=lambda *step: told.append(step))
    bar = snapshot[0]["tqdm_class"](total=100, unit="B", disable=True)
    bar.update(40)
    files_bar = snapshot[0]["tqdm_class"](total=2, unit="it")
    files_bar.update(1)
    assert told == [("downloading", 40, 100)]


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", r"no config\.json"), ("model.safetensors", r"no \.safetensors weights")],
)
def test_incomplete_hub_models_are_refused(
    snapshot: list[dict[str, Any]], tmp_path: Path, missing: str, message: str
) -> None:
    (tmp_path / missing).unlink()
    with pytest.raises(FetchError, match=message):
        resolve_model("org/name")


def hub_error(kind: type[Exception]) -> Exception:
    """Without its constructor, which wants a live HTTP response."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(hub_errors.GatedRepoError), "is gated: ask for access"),
        (hub_error(hub_errors.RepositoryNotFoundError), "is not on the hub, or is private"),
        (hub_error(hub_errors.RevisionNotFoundError), "has no revision None"),
        (hub_errors.LocalEntryNotFoundError("x"), "the hub cannot be reached"),
        (hub_errors.OfflineModeIsEnabled("x"), "the hub cannot be reached"),
        (hub_errors.HFValidationError("x"), "is not on the hub"),
        (OSError(errno.ENOSPC, "x"), "disk is full while fetching org/name.*HF_HOME"),
        (RuntimeError("first.\nsecond"), r"could not be fetched from the hub \(first\)"),
    ],
)
def test_what_the_hub_says_becomes_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(FetchError, match=message):
        resolve_model("org/name")


def announce(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> list[str]:
    """Let the hub say what it has; returns the names that it is asked for."""
    asked: list[str] = []

    def model_info(_: Any, name: str, **__: Any) -> Any:
        asked.append(name)
        files = [SimpleNamespace(rfilename=file, size=size) for file, size in sizes.items()]
        return SimpleNamespace(siblings=files, sha=COMMIT)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return asked


SIZES = {
    "config.json": 1_000,
    "model-1.safetensors": 3_000_000_000,
    "model-2.safetensors": 200_000_000,
    "consolidated.safetensors": 3_200_000_000,
    "original/weights.safetensors": 3_200_000_000,
    "pytorch_model.bin": 3_200_000_000,
    "README.md": 5_000,
}


def test_the_size_is_said_before_a_download(
    snapshot: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, hub_cache: Path
) -> None:
    asked = announce(monkeypatch, SIZES)
    monkeypatch.setattr(hub, "_check_space", lambda *_: None)
    told: list[tuple[str, int, int | None]] = []
    resolve_model("org/name", report=lambda *step: told.append(step))
    assert told == [("downloading org/name (3.3 GB)", 0, 3_200_001_000)]
    bar = snapshot[0]["tqdm_class"](total=100, unit="B", disable=True)
    bar.update(40)
    assert told[1:] == [("downloading org/name (3.3 GB)", 40, 100)]
    # What is here already is not downloaded again.
    put_into_cache(hub_cache, {"config.json": b"{}", "model-1.safetensors": b"x"})
    told.clear()
    pull("org/name", report=lambda *step: told.append(step))
    assert told == [("downloading org/name (200 MB)", 0, 200_000_000)]
    assert asked == ["org/name"] * 2
    resolve_model("org/name")  # a start does not ask for sizes of what is here
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", r"no config\.json"), ("model-", r"no \.safetensors weights")],
)
def test_a_model_that_cannot_be_used_is_not_downloaded(
    snapshot: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, missing: str, message: str
) -> None:
    announce(monkeypatch, {k: v for k, v in SIZES.items() if not k.startswith(missing)})
    with pytest.raises(FetchError, match=message):
        pull("org/name")
    assert snapshot == []


def test_too_little_space_is_seen_before_the_download(
    snapshot: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, {**SIZES, "model-1.safetensors": 1 << 60})
    message = r"org/name needs .* GB, but .* free: free some space or set HF_HOME"
    with pytest.raises(FetchError, match=message):
        resolve_model("org/name")
    assert snapshot == []


def fail_with(error: BaseException, before: Callable[[], object]) -> Callable[..., None]:
    def download(*_: Any, **__: Any) -> None:
        before()
        raise error

    return download


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_failed_first_download_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, hub_cache: Path, error: BaseException
) -> None:
    def begin() -> None:
        put_into_cache(hub_cache, {"config.json": b"{}"})
        (hub_cache / ".locks" / "models--org--name").mkdir(parents=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_with(error, begin))
    with pytest.raises((FetchError, KeyboardInterrupt)):
        pull("org/name")
    assert [path for path in hub_cache.rglob("*") if path.name != ".locks"] == []


@pytest.mark.parametrize("kept", ["a whole file", "a file of another process", "an older model"])
def test_a_failure_removes_nothing_that_is_worth_keeping(
    monkeypatch: pytest.MonkeyPatch, hub_cache: Path, kept: str
) -> None:
    def begin() -> None:
        if kept == "a whole file":
            put_into_cache(hub_cache, {"model-1.safetensors": b"x"})
        if kept == "a file of another process":
            (put_into_cache(hub_cache, {}) / "blobs" / "abc.incomplete").write_bytes(b"x")

    if kept == "an older model":
        put_into_cache(hub_cache, {"config.json": b"{}"})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_with(OSError("cut"), begin))
    with pytest.raises(FetchError, match="could not be fetched"):
        pull("org/name")
    assert (hub_cache / "models--org--name").is_dir()
