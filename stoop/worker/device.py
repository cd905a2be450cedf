"""Choosing a device and preparing it."""

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
from stoop.config.schema import Config
from stoop.layers.stateful import stateful_layers
from stoop.models.loader import describe_model
from stoop.ops.kernels.choice import KERNEL_DTYPES

log = logging.getLogger(__name__)

NEW_OBJECTS = 20_000  # that pile up before they are collected; two steps of 256 requests make 3,000
# Some virtual machines advertise AMX without supporting it, so oneDNN's bf16 GEMMs crash.
_SAFE_ISA = "AVX512_CORE_FP16"
_PROBE = (
    "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); "
    "raise SystemExit(0 if (a @ a).float().sum() == 64**3 else 1)"
)


def find_device(asked: str | torch.device) -> str:
    """Resolve `auto`, `cpu`, `cuda` or `cuda:N` to a concrete device."""
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


def check_sizes(config: Config) -> None:
    """Refuse, before anything is loaded, sizes of a model or of steps that a GPU's kernels do not
    serve."""
    device = config.device
    if device.device == "cpu" or getattr(torch, device.dtype) not in KERNEL_DTYPES:
        return
    for layer in stateful_layers(describe_model(config.model, device)):
        if layer.unserved is not None:
            raise ConfigError(f"the model has {layer.unserved}: use device=cpu")
        most, given = layer.most_tokens, config.schedule.max_num_batched_tokens
        if most is not None and given > most:
            raise ConfigError(
                f"max_num_batched_tokens={given} is more than the {most} tokens of a step that the "
                "GPU kernels of this model's recurrent layers serve: lower it"
            )


def prepare_device(device: str, dtype: str) -> None:
    """Free the memory of dropped engines; on a CPU, avoid AMX if it does not work."""
    if device != "cpu":
        # A dropped engine holds its memory until it is collected. If it was in a reference cycle
        # when it was frozen, its finalizer never ran, so unfreeze here.
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    if device == "cpu" and dtype in ("bfloat16", "float16"):
        _guard_half_precision()


def exempt_from_collection(owner: object) -> None:
    """Exempt all current objects from garbage collection until `owner` is deleted, and collect
    new ones less often.

    A collection that traverses an engine takes tens of milliseconds, in the middle of steps. Those
    of new objects take 1 to 3 ms with hundreds of requests, several times a second, and find
    nothing: what a step makes is freed without them, as long as it may pile up that far. With
    several owners, the first one deleted ends the exemption for all, so that its memory can be
    freed; that only brings the pauses back.
    """
    gc.collect()
    gc.freeze()
    usual, *others = gc.get_threshold()
    if 0 < usual < NEW_OBJECTS:  # 0: the user has turned collection off
        gc.set_threshold(NEW_OBJECTS, *others)
        weakref.finalize(owner, _restore_threshold, usual).atexit = False
    weakref.finalize(owner, gc.unfreeze).atexit = False


def _restore_threshold(usual: int) -> None:
    """Unless somebody has set another one since."""
    now, *others = gc.get_threshold()
    if now == NEW_OBJECTS:
        gc.set_threshold(usual, *others)


def _guard_half_precision() -> None:
    """Disable AMX in oneDNN if a trial GEMM in a child process fails."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ or "amx_tile" not in _cpu_info():
        return
    if not _amx_works():
        log.warning("AMX is advertised but does not work: using ONEDNN_MAX_CPU_ISA=%s", _SAFE_ISA)
        os.environ["ONEDNN_MAX_CPU_ISA"] = _SAFE_ISA  # read at oneDNN's first GEMM


@functools.cache
def _amx_works() -> bool:
    """Return the cached verdict of an earlier process, or run a trial, which takes seconds."""
    path = cache_dir() / f"amx-{_platform_key()}"
    verdict = _read_verdict(path)
    if verdict is None:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
        verdict = "works" if done.returncode == 0 else "broken"
        _write_verdict(path, verdict)
    return verdict == "works"


def _platform_key() -> str:
    """Hash what the verdict depends on: the processor, the OS kernel (it enables AMX) and torch."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
    first = _cpu_info().split("\n\n", 1)[0]  # all processors are the same
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
    """Write the verdict atomically; without a writable cache, the next process tries again."""
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
            "the cache folder %s cannot be written (%s), so the next start tests AMX again: set "
            "STOOP_CACHE to a writable folder",
            path.parent,
            error,
        )


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
