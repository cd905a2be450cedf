"""Measures vLLM on the same shape with the same method, in a separate process and Python."""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from stoop.bench import vllm_worker
from stoop.bench.shapes import SHAPES, head_config, target_config
from stoop.config.errors import ConfigError
from stoop.config.speculation import MAX_DRAFTS

NUM_LINES = 12  # of the peer's output, shown if it fails
# Finding the module is much faster than importing it.
LOOK = "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"
SPARE_TOKENS = 2 * vllm_worker.FEW_TOKENS


@dataclass(frozen=True)
class PeerLoad:
    """What to measure; k is the command's --k."""

    shape: str
    k: int
    batch: list[int]
    prompt_len: int
    first_token: list[int]  # prompt lengths to measure time to first token for
    steps: int
    repeat: int

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"--shape {self.shape}: use {', '.join(SHAPES)}")
        if not 0 <= self.k <= MAX_DRAFTS:
            raise ConfigError(f"--k {self.k}: use 1 to {MAX_DRAFTS} drafts per step, or 0 for none")

    def as_task(self) -> dict[str, Any]:
        longest = max([self.prompt_len, *self.first_token]) + self.steps + self.k + SPARE_TOKENS
        target = target_config(self.shape, longest)
        sizes = {"max_model_len": longest, "target": target, "head": head_config(target)}
        return asdict(self) | sizes


@dataclass(frozen=True)
class PeerResult:
    """The peer's measurements."""

    engine: str
    start_s: float
    ms_per_step: dict[int, float]  # by batch
    first_token_ms: dict[int, float]  # by prompt length


def measure_vllm(load: PeerLoad, python: str) -> PeerResult:
    """Run vLLM; its log goes to standard error. python: an interpreter with vLLM installed"""
    try:
        found = subprocess.run([python, "-c", LOOK], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(
            f"--python {python} cannot be run ({error.strerror}): give the path of a Python "
            "interpreter that has vLLM"
        ) from None
    if found.returncode:
        raise ConfigError(
            f"--python {python} has no vllm: pip install vllm there, or give the Python of an "
            "environment that has it"
        )
    with tempfile.TemporaryDirectory(prefix="stoop-peer-") as folder:
        # Run a copy in an empty folder: Python searches a program's own folder first, and modules
        # of this one must not shadow others of the same name.
        program = shutil.copy(vllm_worker.__file__, folder)
        done = subprocess.run(
            [python, program], input=json.dumps(load.as_task()), stdout=subprocess.PIPE, text=True
        )
    lines = done.stdout.splitlines()
    found_lines = [line for line in lines if line.startswith(vllm_worker.MARK)]
    if not found_lines:  # with a result, a crash at exit does not matter
        print("\n".join(lines[-NUM_LINES:]), file=sys.stderr)
        raise ConfigError(f"vllm ended with status {done.returncode}: see its output above")
    record = json.loads(found_lines[-1].removeprefix(vllm_worker.MARK))
    for name in ("ms_per_step", "first_token_ms"):  # JSON keys are strings
        record[name] = {int(key): value for key, value in record[name].items()}
    return PeerResult(**record)
