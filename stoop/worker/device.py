"""Which device to run on, and what must be set up before it is used."""

import gc
import logging
import os
import platform
import subprocess
import sys
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


def find_device(asked: str) -> str:
    """A concrete device for `auto`, `cpu`, `cuda` or `cuda:N`."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return "cpu"
    name, _, index = asked.partition(":")
    if name != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device={asked!r}: use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={asked!r}: torch sees no CUDA device here; use device='cpu'")
    number = int(index or torch.cuda.current_device())
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
    if "ONEDNN_MAX_CPU_ISA" in os.environ or "amx_tile" not in _cpu_flags():
        return
    verdict = cache_dir() / f"amx-{platform.node()}-{torch.__version__}"
    if not verdict.exists():
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
        verdict.parent.mkdir(parents=True, exist_ok=True)
        verdict.write_text("works" if done.returncode == 0 else "broken")
    if verdict.read_text() == "broken":
        log.warning("AMX is announced but does not work here: ONEDNN_MAX_CPU_ISA=%s", _SAFE_ISA)
        os.environ["ONEDNN_MAX_CPU_ISA"] = _SAFE_ISA  # read at oneDNN's first product


def _cpu_flags() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
