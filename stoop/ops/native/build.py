"""Compiles the C++ kernels at their first use and keeps the library in the cache.

They include no header of Python or torch, so any C++17 compiler on the machine will do, and a
compilation takes seconds. Without a compiler, or where it fails, there are no kernels: callers ask
`load_library` and fall back to torch.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from stoop.config.environ import cache_dir, cpu_isa
from stoop.core.report import Report

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
MAIN = "stoop_cpu.cpp"
COMPILERS = ("c++", "g++", "clang++")
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-w")
# The compiler must not decide by itself where to fuse a product and a sum: results would differ
# between the versions of a kernel for one token and for several.
EXACT_FLAGS = ("-ffp-contract=off",)
ISA_FLAGS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "generic": (),
}
# Names of the same in /proc/cpuinfo
ISA_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "generic": set(),
}
# Used with AVX-512 if the processor has them
EXTRA_FLAGS = {"avx512_vnni": "-mavx512vnni"}
TIMEOUT_SECONDS = 300
# In the cache: of installations side by side, and of other instruction sets
MAX_LIBRARIES = 6


class BuildError(Exception):
    """The kernels cannot be had here; the message says why, in a clause."""


@functools.cache
def processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def best_isa() -> str:
    """The widest instruction set that the processor has, or the one that STOOP_CPU_ISA asks for."""
    flags = processor_flags()
    able = [isa for isa, needed in ISA_NEEDS.items() if needed <= flags]
    asked = cpu_isa()
    names = list(ISA_NEEDS)
    allowed = names if asked is None else names[names.index(asked) :]
    return next(isa for isa in allowed if isa in able)


def _flags() -> list[str]:
    isa, found = best_isa(), processor_flags()
    extra = [flag for name, flag in EXTRA_FLAGS.items() if isa == "avx512" and name in found]
    return [*COMMON_FLAGS, *EXACT_FLAGS, *ISA_FLAGS[isa], *extra]


def library_path() -> Path:
    """Where the library is, or will be: its name tells the source, the flags and the machine."""
    digest = hashlib.sha256()
    try:
        for source in sorted(SOURCES.iterdir()):
            if source.suffix in (".h", ".cpp"):
                digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    except OSError as error:
        raise BuildError(f"their source cannot be read ({error}): install stoop again") from error
    isa = best_isa()
    digest.update(" ".join(_flags()).encode())
    digest.update(platform.machine().encode())
    return cache_dir() / "native" / f"stoop_cpu-{isa}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> str | None:
    asked = os.environ.get("CXX")
    names = (asked, *COMPILERS) if asked else COMPILERS
    return next((found for found in map(shutil.which, names) if found), None)


def build(report: Report | None = None, broken: bool = False) -> Path:
    """Compile the library, unless it is there. broken: the one that is there cannot be loaded"""
    from filelock import FileLock

    path = library_path()
    if path.is_file() and not broken:
        with contextlib.suppress(OSError):  # a cache that cannot be written
            os.utime(path)  # so that `_remove_old` knows that it is in use
        return path
    if not sys.platform.startswith("linux"):
        raise BuildError(f"they need Linux, and this is {sys.platform}")
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("there is no C++ compiler (install g++, for example)")
    if report:
        report("compiling the CPU kernels, once", 0, None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Processes that start at the same time need one compilation only.
        with FileLock(path.with_name(f".{path.name}.lock")):
            if broken or not path.is_file():
                _compile_to(path, compiler)
                _remove_old(path)
    except OSError as error:
        raise BuildError(f"the cache folder {path.parent} cannot be written ({error})") from error
    return path


def _compile_to(path: Path, compiler: str) -> None:
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    try:
        _compile(compiler, Path(fresh))
        os.chmod(fresh, 0o755)
        with open(fresh, "rb") as file:
            os.fsync(file.fileno())  # half a library, after a loss of power, would end the process
        os.replace(fresh, path)  # other processes see it complete or not at all
    finally:
        Path(fresh).unlink(missing_ok=True)


def _remove_old(path: Path) -> None:
    """Keep the libraries that were used last; those of older sources would pile up.

    A process that has loaded one keeps it. Locks stay, since another process may hold one.
    """
    with contextlib.suppress(OSError):  # the new one is there: a start must not fail for this
        others = [each for each in path.parent.glob("stoop_cpu-*.so") if each != path]
        others.sort(key=_last_used, reverse=True)
        for each in others[MAX_LIBRARIES - 1 :]:
            each.unlink(missing_ok=True)


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # another process has just removed it


def _compile(compiler: str, output: Path) -> None:
    command = [compiler, *_flags(), str(SOURCES / MAIN), "-o", str(output)]
    log.info("compiling the CPU kernels: %s", " ".join(command))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} did not run ({error})") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{compiler} could not compile them ({first})")


def load(report: Report | None = None) -> ctypes.CDLL:
    """The library, compiled if it is not there, or again if what is there cannot be loaded: a file
    that was cut short, or one that another system compiled into a shared folder."""
    try:
        return ctypes.CDLL(str(build(report)))
    except OSError:
        path = build(report, broken=True)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the library cannot be loaded ({error})") from error
