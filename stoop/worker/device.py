"""Which device to run on, and what must be set up before it is used."""

import functools
import gc
import hashlib
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import torch

from stoop.config.environ import cache_dir
from stoop.config.errors import ConfigError

log = logging.getLogger(__name__)

# Some virtual machines announce AMX and then lack it, so that oneDNN's bf16 products die.
_SAFE_ISA = "AVX512_CORE_FP16"
_PROBE = (
    "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); "
    "raise SystemExit(0 if (a @ a).float().sum() == 64**3 else 1)"
)


def find_device(asked: str | torch.device) -> str:
    """A concrete device for `auto`, `cpu`, `cuda` or `cuda:N`."""
    if isinstance(asked, torch.device):
        asked = str(asked)
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return "cpu"
    match = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", asked) if isinstance(asked, str) else None
    if match is None:
        raise ConfigError(f"device={repr(asked)[:80]}: use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={asked!r}: torch sees no CUDA device here; use device='cpu'")
    number = int(match[1] or torch.cuda.current_device())
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"device={asked!r}: this machine has {torch.cuda.device_count()} CUDA devices, "
            "numbered from 0"
        )
    return f"cuda:{number}"


def prepare_device(device: str, dtype: str) -> None:
    if device != "cpu":
        # An engine that was dropped holds its memory until it is collected, and one that was part
        # of a cycle when it was exempt from that could not say that it was.
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    if device == "cpu" and dtype in ("bfloat16", "float16"):
        _guard_half_precision()


def exempt_from_collection(owner: object) -> None:
    """Let the garbage collector pass over all that is there now, until `owner` goes.

    To look through an engine takes it tens of milliseconds, in the midst of steps. Of several
    owners the first that goes ends it for all, or what it held would stay; that costs pauses only.
    """
    gc.collect()
    gc.freeze()
    weakref.finalize(owner, gc.unfreeze).atexit = False


def _guard_half_precision() -> None:
    """Keep oneDNN off AMX where a trial product in a child process does not survive it."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ or "amx_tile" not in _cpu_info():
        return
    if not _amx_works():
        log.warning("AMX is announced but does not work here: ONEDNN_MAX_CPU_ISA=%s", _SAFE_ISA)
        os.environ["ONEDNN_MAX_CPU_ISA"] = _SAFE_ISA  # read at oneDNN's first product


@functools.cache
def _amx_works() -> bool:
    """The verdict of an earlier process if there is one; a trial takes seconds."""
    path = cache_dir() / f"amx-{_platform_key()}"
    verdict = _read_verdict(path)
    if verdict is None:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
        verdict = "works" if done.returncode == 0 else "broken"
        _write_verdict(path, verdict)
    return verdict == "works"


def _platform_key() -> str:
    """What the verdict depends on: the processor, the kernel (which hands out AMX), and torch."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
    first = _cpu_info().split("\n\n", 1)[0]  # all processors of a machine are alike
    lines = [line for line in first.splitlines() if line.split(":")[0].strip() in wanted]
    parts = [*lines, platform.system(), platform.release(), torch.__version__]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _read_verdict(path: Path) -> str | None:
    try:
        verdict = path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return verdict if verdict in ("works", "broken") else None


def _write_verdict(path: Path, verdict: str) -> None:
    """Write it whole or not at all; without a cache, the next process tries again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(verdict)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        log.warning(
            "the cache folder %s cannot be written (%s), so AMX is tried again at the next start: "
            "set STOOP_CACHE to a folder that you can write to",
            path.parent,
            error,
        )


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
