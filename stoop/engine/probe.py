"""Milliseconds of a step with no, one, two ... drafts on this machine, measured and kept."""

import dataclasses
import gc
import hashlib
import itertools
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from stoop.checkpoint.report import Report
from stoop.config.environ import cache_dir
from stoop.config.schema import EngineOptions, ModelSpec
from stoop.core.outputs import RequestOutput
from stoop.core.sampling_params import SamplingParams
from stoop.engine.inputs import Prompt
from stoop.version import __version__

log = logging.getLogger(__name__)

MAX_DRAFTS = 3
PROMPT_LEN, MODEL_LEN = 32, 256
WARM_STEPS, TIMED_STEPS = 4, 24
STORE = "drafts.json"
BUSY = 0.75


class Steps(Protocol):
    """As much of an engine as is timed."""

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> None: ...

    def step(self) -> list[RequestOutput]: ...


Build = Callable[[EngineOptions], Steps]


def step_times(
    options: EngineOptions, model: ModelSpec, head: Path, build: Build, report: Report | None
) -> list[float]:
    """Milliseconds with 0, 1 ... drafts: measured by engines for one request, and kept for later
    starts if nobody else was at work."""
    path, key = cache_dir() / STORE, _machine(options, model, head)
    known = _read(path)
    if key not in known:
        busy = _is_busy()
        times = []
        for num_drafts in range(MAX_DRAFTS + 1):
            if report is not None:
                report("measuring whether drafts pay here", num_drafts, MAX_DRAFTS + 1)
            chosen = _probe(options, model, head, num_drafts)
            times.append(time_steps(build(chosen), model.vocab_size))
            gc.collect()  # an engine has cycles, and the next one measures free memory
        times = list(itertools.accumulate(times, max))  # what seems to save time is noise
        if busy:
            log.warning("this machine is busy: whether drafts pay is measured anew next time")
            return times
        known = {**_read(path), key: times}
        _write(path, known)
    return known[key]


def _is_busy() -> bool:
    """Whether others have most of the processors, by the load of the last minute."""
    try:
        return os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):  # not known here
        return False


def _probe(options: EngineOptions, model: ModelSpec, head: Path, num_drafts: int) -> EngineOptions:
    """An engine as the user's, but for one short request."""
    drafter = {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_drafts}
    return dataclasses.replace(
        EngineOptions(model=options.model, dtype=options.dtype, device=options.device),
        attention_backend=options.attention_backend,
        graph_mode=options.graph_mode,
        speculative_config=drafter if num_drafts else None,
        skip_tokenizer_init=True,
        max_model_len=min(MODEL_LEN, model.max_position),
        max_num_seqs=1,
        kv_cache_memory="64MiB",
    )


def time_steps(engine: Steps, vocab_size: int) -> float:
    """Milliseconds: the lower quartile, since whatever else the machine does only adds to it."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    prompt = [(vocab_size // 2 + place) % vocab_size for place in range(PROMPT_LEN)]
    engine.add_request("probe", {"prompt_token_ids": prompt}, params)
    for _ in range(WARM_STEPS):
        engine.step()
    times = []
    for _ in range(TIMED_STEPS):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return 1000 * sorted(times)[TIMED_STEPS // 4]


def _machine(options: EngineOptions, model: ModelSpec, head: Path) -> str:
    """What step times depend on."""
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    parts = (
        options.model, dtype, options.attention_backend, options.graph_mode,
        hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()[:16],
        _processor(), str(torch.get_num_threads()), torch.__version__, __version__,
    )  # fmt: skip
    return "|".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} x {names[0] if names else platform.machine()}"


def _read(path: Path) -> dict[str, list[float]]:
    try:
        found = json.loads(path.read_text()).items()
        return {key: [float(ms) for ms in times] for key, times in found if len(times) > MAX_DRAFTS}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, known: dict[str, list[float]]) -> None:
    """Whole or not at all; a cache that cannot be written costs the next start some seconds."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(known, indent=1) + "\n")
        fresh.replace(path)
    except OSError as error:
        log.warning("%s cannot be written (%s): drafts are measured anew next time", path, error)
