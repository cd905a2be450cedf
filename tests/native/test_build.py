"""Compiling the kernels: once, by one process, and never in the way of those who cannot."""

import ctypes
import fnmatch
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import stoop
from stoop.config.errors import ConfigError
from stoop.config.schema import EngineOptions
from stoop.engine.choose_weights import choose_packed
from stoop.ops.native import build as native_build
from stoop.ops.native import library
from stoop.ops.native.build import BuildError, best_isa, build, library_path, load
from stoop.ops.native.library import Native, find_native, native_problem
from support.packed_models import write_packable_gguf

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has not asked for kernels yet."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(native_build, "cache_dir", lambda: folder)
    monkeypatch.setenv("STOOP_CACHE", str(folder))
    monkeypatch.setattr(library, "_native", None)
    monkeypatch.setattr(library, "_problem", None)
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Sets a shell script as the compiler; it appends a line to the file `calls`."""

    def use(script: str) -> Path:
        file, calls = tmp_path / "compiler", tmp_path / "calls"
        file.write_text(
            f'#!/bin/sh\necho run >> "{calls}"\nwhile [ "$1" != -o ]; do shift; done\n{script}\n'
        )
        file.chmod(0o755)
        monkeypatch.setenv("CXX", str(file))
        return calls

    return use


def fake_library(folder: Path) -> Path:
    """A library that loads, with nothing in it."""
    file = folder / "empty.so"
    if not file.exists():
        source = folder / "empty.c"
        source.write_text("int stoop_version() { return -1; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(file)], check=True)
    return file


def options_for(tmp_path: Path, **more: object) -> EngineOptions:
    file = tmp_path / "model.gguf"
    if not file.exists():
        write_packable_gguf(file)
    return EngineOptions(**{"model": str(file), **more})  # type: ignore[arg-type]


# ---- what a machine and an installation have ----


def test_sources_are_installed() -> None:
    """Every file beside the code matches a pattern of the package's data."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["stoop"]
    package = Path(stoop.__file__).parent
    tracked = subprocess.run(
        ["git", "ls-files", "stoop"],
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if tracked.returncode:
        pytest.skip("not a checkout")
    names = [name.removeprefix("stoop/") for name in tracked.stdout.split()]
    others = [name for name in names if not name.endswith(".py")]
    assert any(name.endswith("stoop_cpu.cpp") for name in others)
    lost = [n for n in others if not any(fnmatch.fnmatch(n, pattern) for pattern in patterns)]
    assert lost == []


@pytest.mark.parametrize(
    ("flags", "asked", "chosen"),
    [
        ("avx512", None, "avx512"),
        ("avx512", "avx512", "avx512"),
        ("avx512", "avx2", "avx2"),
        ("avx512", "generic", "generic"),
        ("avx2", None, "avx2"),
        ("avx2", "avx512", "avx2"),  # the widest that it has below
        ("generic", None, "generic"),
        ("generic", "avx512", "generic"),
    ],
)
def test_the_instruction_set(
    monkeypatch: pytest.MonkeyPatch, flags: str, asked: str | None, chosen: str
) -> None:
    has = frozenset({"fpu"} | native_build.ISA_NEEDS[flags])
    monkeypatch.setattr(native_build, "processor_flags", lambda: has)
    monkeypatch.delenv("STOOP_CPU_ISA", raising=False)
    if asked:
        monkeypatch.setenv("STOOP_CPU_ISA", asked)
    assert best_isa() == chosen
    assert f"-{chosen}-" in library_path().name


def test_an_unknown_instruction_set_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOOP_CPU_ISA", "avx1024")
    with pytest.raises(ConfigError, match=r"STOOP_CPU_ISA='avx1024': use avx512, avx2 or generic$"):
        choose_packed(options_for(tmp_path), "cpu", None)


def test_the_name_tells_source_and_flags(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library_path()
    monkeypatch.setattr(native_build, "EXACT_FLAGS", ())
    assert library_path() != before


# ---- compiling ----


def test_it_is_compiled_once(cache: Path, tmp_path: Path, compiler: Callable[[str], Path]) -> None:
    calls = compiler(f'cp "{fake_library(tmp_path)}" "$2"')
    stages: list[str] = []
    path = build(lambda stage, done, total: stages.append(stage))
    assert build() == path == library_path() and path.is_file()
    assert calls.read_text() == "run\n" and stages == ["compiling the CPU kernels, once"]
    assert {each.name for each in path.parent.iterdir()} == {path.name, f".{path.name}.lock"}


def make_old_libraries(folder: Path, count: int) -> list[Path]:
    """Libraries of other sources; the first was used last."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"stoop_cpu-avx2-{number:016x}.so" for number in range(count)]
    for age, file in enumerate(files):
        file.write_text("old")
        os.utime(file, (1e9 - age, 1e9 - age))
    return files


def test_old_libraries_are_removed(
    cache: Path, tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    """Those that were used last stay, as do files of other names."""
    compiler(f'cp "{fake_library(tmp_path)}" "$2"')
    old = make_old_libraries(cache / "native", 9)
    lock, other = cache / "native" / ".stoop_cpu-avx2-0.so.lock", cache / "native" / "other.so"
    lock.touch(), other.touch()
    path = build()
    kept = native_build.MAX_LIBRARIES - 1
    assert [each.exists() for each in old] == [True] * kept + [False] * (9 - kept)
    assert path.is_file() and lock.exists() and other.exists()


def test_a_library_in_use_counts_as_new(
    cache: Path, tmp_path: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(f'cp "{fake_library(tmp_path)}" "$2"')
    used = build()
    os.utime(used, (1, 1))
    old = make_old_libraries(cache / "native", 9)
    assert build() == used  # a start
    monkeypatch.setattr(native_build, "EXACT_FLAGS", ())  # another installation
    other = build()
    assert other != used and used.exists() and other.exists()
    assert sum(each.exists() for each in old) == native_build.MAX_LIBRARIES - 2


def test_a_loaded_library_may_be_removed(
    cache: Path, tmp_path: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(f'cp "{fake_library(tmp_path)}" "$2"')
    loaded, path = load(), library_path()
    monkeypatch.setattr(native_build, "MAX_LIBRARIES", 1)
    monkeypatch.setattr(native_build, "EXACT_FLAGS", ())
    build()
    assert not path.exists() and loaded.stoop_version() == -1


def test_old_libraries_that_cannot_be_removed(
    cache: Path, tmp_path: Path, compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do no harm."""
    compiler(f'cp "{fake_library(tmp_path)}" "$2"')
    make_old_libraries(cache / "native", 9)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not yours")

    unlink = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda p, **more: (refuse if p.suffix == ".so" else unlink)(p, **more)
    )
    monkeypatch.setattr(os, "utime", refuse)
    assert build() == build() == library_path()


def test_threads_and_processes_that_start_together_compile_once(
    cache: Path, tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    calls = compiler(f'sleep 0.5; cp "{fake_library(tmp_path)}" "$2"')
    code = "from stoop.ops.native.build import build; print(build())"
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = [child.communicate()[0].strip() for child in children]
    assert outputs == [str(library_path())] * 2
    assert calls.read_text() == "run\n"


def test_a_compiler_that_fails(
    cache: Path, tmp_path: Path, compiler: Callable[[str], Path]
) -> None:
    compiler('echo "stoop_cpu.cpp:1: error: no such thing" >&2; touch "$2"; exit 1')
    with pytest.raises(BuildError, match=r"could not compile them \(.*error: no such thing\)$"):
        build()
    assert [each.suffix for each in (cache / "native").iterdir()] == [".lock"]
    assert find_native() is None and find_native() is None
    assert "no such thing" in str(native_problem())


def test_a_compiler_that_cannot_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "compiler"
    file.write_bytes(b"\x7fELF nothing")
    file.chmod(0o755)
    monkeypatch.setenv("CXX", str(file))
    with pytest.raises(BuildError, match="did not run"):
        build()


def test_a_compiler_that_takes_forever(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: Callable[[str], Path]
) -> None:
    compiler("exec sleep 30")
    monkeypatch.setattr(native_build, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(BuildError, match=r"did not run.*timed out"):
        build()


def test_a_cache_that_cannot_be_written(cache: Path, compiler: Callable[[str], Path]) -> None:
    compiler("exit 1")
    cache.write_text("a file")
    with pytest.raises(BuildError, match=r"the cache folder .*/native cannot be written"):
        build()


def test_lost_sources(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "SOURCES", tmp_path / "nowhere")
    assert find_native() is None
    assert "their source cannot be read" in str(native_problem())


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_library_that_cannot_be_loaded_is_compiled_again(
    cache: Path, tmp_path: Path, compiler: Callable[[str], Path], damage: str
) -> None:
    good = fake_library(tmp_path)
    calls = compiler(f'cp "{good}" "$2"')
    path = library_path()
    path.parent.mkdir(parents=True)
    content = {"empty": b"", "cut": good.read_bytes()[:40], "text": b"not a library"}[damage]
    path.write_bytes(content)
    assert isinstance(load(), ctypes.CDLL)
    assert calls.read_text() == "run\n"


def test_a_library_that_never_loads(cache: Path, compiler: Callable[[str], Path]) -> None:
    calls = compiler('echo nothing > "$2"')
    assert find_native() is None
    assert "the library cannot be loaded" in str(native_problem())
    assert calls.read_text() == "run\nrun\n"


def test_a_library_of_another_version(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Callable[[str], Path]
) -> None:
    monkeypatch.setattr(library, "_SIGNATURES", {"stoop_version": (ctypes.c_int, [])})
    compiler(f'cp "{fake_library(tmp_path)}" "$2"')
    assert find_native() is None
    assert native_problem() == f"the library has version -1 instead of {library.VERSION}"


# ---- choosing weights ----


def test_without_a_compiler_weights_are_dense_with_one_warning(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)
    assert not choose_packed(options_for(tmp_path), "cpu", None)
    (record,) = caplog.records
    assert "are dequantised" in record.message and "no C++ compiler (install g++" in record.message
    with pytest.raises(
        ConfigError,
        match=r"^weights=packed: it needs stoop's CPU kernels, and there is no C\+\+ compiler "
        r"\(install g\+\+, for example\); use weights=auto or weights=dense$",
    ):
        choose_packed(options_for(tmp_path, weights="packed"), "cpu", None)
    caplog.clear()
    assert not choose_packed(options_for(tmp_path, weights="dense"), "cpu", None)
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "cuda:0", "it is for CPUs, and the device is cuda:0"),
        ({"dtype": "bfloat16"}, "cpu", "it computes in float32, and dtype is bfloat16"),
        ({"weight_dtype": "bfloat16"}, "cpu", "it computes in float32, and weight_dtype is bfl"),
        ({"load_format": "dummy"}, "cpu", "dummy weights are not quantised"),
    ],
)
def test_options_that_rule_packed_weights_out(
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, object],
    device: str,
    reason: str,
) -> None:
    """Refused before anything is compiled; `auto` says nothing."""
    assert not choose_packed(options_for(tmp_path, **changes), device, None)
    with pytest.raises(ConfigError, match=f"^weights=packed: {reason}.*; use weights=auto or weig"):
        choose_packed(options_for(tmp_path, weights="packed", **changes), device, None)
    assert not caplog.records and not (cache / "native").exists()


def test_models_that_cannot_be_packed(cache: Path, tmp_path: Path) -> None:
    dense = write_packable_gguf(tmp_path / "dense.gguf", lambda _: "F32")
    for model in (tmp_path, dense, "org/name"):
        assert not choose_packed(EngineOptions(model=str(model)), "cpu", None)
        with pytest.raises(ConfigError, match="is not a GGUF file whose matrices are of the types"):
            choose_packed(EngineOptions(model=str(model), weights="packed"), "cpu", None)


def test_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights='tiny': use auto, packed or dense"):
        stoop.LLM(str(tmp_path), weights="tiny")


# ---- threads and processes ----

CHILD = """
import os, sys, torch
from support.packed_models import make_matrix
matrix = make_matrix(["Q4_1"], 64, 64)
x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
torch.set_num_threads(2)
first = matrix.scheme.linear(x, matrix.weight, None)
child = os.fork()
same = all(torch.equal(first, matrix.scheme.linear(x, matrix.weight, None)) for _ in range(3))
if child == 0:
    os._exit(0 if same else 1)
print(same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.usefixtures("native")
def test_a_forked_child_has_kernels() -> None:
    """It has none of its parent's threads, so it starts its own."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "True 0\n", done


def test_teams_follow_the_threads_of_torch(native: Native) -> None:
    import torch

    teams = []
    for num_threads in (1, 2, 3, 2, 1):
        torch.set_num_threads(num_threads)
        teams.append(native.team)
    assert teams[0] == teams[4] and teams[1] == teams[3] and len(set(teams)) == 3


def test_callers_on_several_threads_take_turns(native: Native) -> None:
    import torch

    from support.packed_models import make_matrix

    torch.set_num_threads(2)
    matrices = [make_matrix([kind], 64, 256, seed=n) for n, kind in enumerate(("Q4_1", "Q6_K"))]
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    expected = [m.scheme.linear(x, m.weight, None) for m in matrices]
    wrong: list[int] = []

    def work(number: int) -> None:
        matrix = matrices[number]
        for _ in range(50):
            if not torch.equal(matrix.scheme.linear(x, matrix.weight, None), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
