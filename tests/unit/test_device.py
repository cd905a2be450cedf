"""The trial of AMX: made once for what it depends on, and kept whole or not at all."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop.worker import device
from stoop.worker.device import find_device, prepare_device

CPU = "processor : 0\nmodel name : Xeon\ncpu MHz : 2000.1\nflags : fpu amx_tile amx_bf16\n"


class Trials:
    """Stands in for the child process; counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0
        self.status = 0

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.count += 1
        return subprocess.CompletedProcess(command, self.status)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trials]:
    """A machine that announces AMX, with a cache of its own."""
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(device, "_cpu_info", lambda: CPU)
    fake = Trials()
    monkeypatch.setattr(device.subprocess, "run", fake)
    device._amx_works.cache_clear()
    yield fake
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    device._amx_works.cache_clear()


def prepare_in_new_process() -> str | None:
    """As a process does that starts now; the instruction set that it keeps oneDNN to."""
    device.os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
    device._amx_works.cache_clear()
    prepare_device("cpu", "bfloat16")
    return device.os.environ.get("ONEDNN_MAX_CPU_ISA")


@pytest.mark.parametrize(
    ("status", "isa"), [(0, None), (1, "AVX512_CORE_FP16"), (-4, device._SAFE_ISA)]
)
def test_the_verdict_is_kept(trials: Trials, tmp_path: Path, status: int, isa: str | None) -> None:
    trials.status = status
    assert [prepare_in_new_process() for _ in range(3)] == [isa] * 3
    assert trials.count == 1
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.read_text() == ("works" if status == 0 else "broken")


def test_another_processor_kernel_or_torch_is_tried_anew(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_in_new_process()
    # A clock that changes and another host name are the same machine still.
    monkeypatch.setattr(device, "_cpu_info", lambda: CPU.replace("2000.1", "3100.7"))
    monkeypatch.setattr(device.platform, "node", lambda: "another-name")
    prepare_in_new_process()
    assert trials.count == 1
    monkeypatch.setattr(device.platform, "release", lambda: "99.1")
    prepare_in_new_process()
    assert trials.count == 2
    monkeypatch.setattr(torch, "__version__", "99.2")
    prepare_in_new_process()
    assert trials.count == 3
    monkeypatch.setattr(device, "_cpu_info", lambda: CPU.replace("amx_bf16", ""))
    prepare_in_new_process()
    assert trials.count == 4


def forbid_writing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(cache))

    monkeypatch.setattr(device.tempfile, "mkstemp", refuse)


def put_a_file_there(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.write_text("not a folder")


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(device.os, "replace", refuse)


@pytest.mark.parametrize("harm", [forbid_writing, put_a_file_there, fill_the_disk])
def test_an_unwritable_cache_costs_a_trial_only(
    trials: Trials,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Any,
) -> None:
    harm(monkeypatch, tmp_path / "cache")
    trials.status = 1
    assert prepare_in_new_process() == device._SAFE_ISA
    assert "set STOOP_CACHE to a writable folder" in caplog.text
    if (tmp_path / "cache").is_dir():
        assert list((tmp_path / "cache").iterdir()) == []
    device.os.environ.pop("ONEDNN_MAX_CPU_ISA")
    prepare_device("cpu", "float16")  # the same process does not try again
    assert trials.count == 1


@pytest.mark.parametrize("content", [b"", b"wor", b"\xff\xfe"])
def test_a_torn_verdict_is_tried_anew(trials: Trials, tmp_path: Path, content: bytes) -> None:
    prepare_in_new_process()
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(content)
    prepare_in_new_process()
    assert trials.count == 2 and kept.read_text() == "works"


def test_without_amx_or_half_precision_nothing_is_tried(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_device("cpu", "float32")
    monkeypatch.setattr(device, "_cpu_info", lambda: "flags : fpu avx512f\n")
    prepare_device("cpu", "bfloat16")
    assert trials.count == 0


def test_a_torch_device_is_taken() -> None:
    assert find_device(torch.device("cpu")) == "cpu"
