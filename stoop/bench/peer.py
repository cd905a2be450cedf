"""Measures vLLM on the same shape with the same method, in a separate process and Python."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stoop.bench import vllm_worker
from stoop.bench.shape_configs import SHAPES
from stoop.bench.shapes import head_config, target_config
from stoop.bench.throughput import Drafts, PeerSpeeds, Traffic
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
    """Measure steps and first tokens. python: an interpreter with vLLM installed"""
    record = _run_vllm(load.as_task(), python)
    for name in ("ms_per_step", "first_token_ms"):  # JSON keys are strings
        record[name] = {int(key): value for key, value in record[name].items()}
    return PeerResult(**record)


def measure_vllm_loads(
    shape: str, traffic: Traffic, drafts: Sequence[int], repeat: int, python: str
) -> PeerSpeeds:
    """Measure throughput for every load and K, with an engine for each K."""
    found: dict[tuple[int, Drafts], list[float]] = {}
    engine = ""
    for k in drafts:
        record = _run_vllm(_load_task(shape, traffic, k, repeat), python)
        engine = record["engine"]
        for load, speeds in record["tokens_per_s"].items():
            found[int(load), k] = speeds
    return PeerSpeeds(engine, found)


def _load_task(shape: str, traffic: Traffic, k: int, repeat: int) -> dict[str, Any]:
    longest = traffic.input_len + traffic.output_len + k + SPARE_TOKENS
    target = target_config(shape, longest)
    return {
        "k": k,
        "batch": list(traffic.loads),
        "prompt_len": traffic.input_len,
        "output_len": traffic.output_len,
        "groups": {str(load): traffic.groups(load) for load in traffic.loads},
        "repeat": repeat,
        "max_model_len": longest,
        "target": target,
        "head": head_config(target),
    }


def vllm_problem(python: str) -> str | None:
    """Why this interpreter cannot run vLLM, and what to do; None if it can."""
    try:
        found = subprocess.run([python, "-c", LOOK], capture_output=True, text=True)
    except OSError as error:
        return (
            f"--python {python} cannot be run ({error.strerror}): give the path of a Python "
            "interpreter that has vLLM"
        )
    if found.returncode:
        return (
            f"--python {python} has no vllm: pip install vllm there, or give the Python of an "
            "environment that has it"
        )
    return None


def _run_vllm(task: dict[str, Any], python: str) -> dict[str, Any]:
    """Run vLLM; its log goes to standard error."""
    problem = vllm_problem(python)
    if problem is not None:
        raise ConfigError(problem)
    with tempfile.TemporaryDirectory(prefix="stoop-peer-") as folder:
        # Run a copy in an empty folder: Python searches a program's own folder first, and modules
        # of this one must not shadow others of the same name.
        program = shutil.copy(vllm_worker.__file__, folder)
        done = subprocess.run(
            [python, program], input=json.dumps(task), stdout=subprocess.PIPE, text=True
        )
    lines = done.stdout.splitlines()
    found_lines = [line for line in lines if line.startswith(vllm_worker.MARK)]
    if not found_lines:  # with a result, a crash at exit does not matter
        print("\n".join(lines[-NUM_LINES:]), file=sys.stderr)
        raise ConfigError(f"vllm ended with status {done.returncode}: see its output above")
    record: dict[str, Any] = json.loads(found_lines[-1].removeprefix(vllm_worker.MARK))
    return record
