"""The processes of `stoop bench cpu`: starting them, asking them, and who else uses the cores."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from stoop.bench import cpu_worker
from stoop.config.errors import ConfigError, StoopError
from stoop.worker.core_usage import seconds_used

STOOP, LLAMA_CPP, TRANSFORMERS = "stoop", "llama.cpp", "transformers"
MODULES = {LLAMA_CPP: "llama_cpp", TRANSFORMERS: "transformers"}
PACKAGES = {LLAMA_CPP: "llama-cpp-python", TRANSFORMERS: "transformers"}
NUM_LINES = 12  # of an engine's output, shown if its process dies
BUSY_CORES = 0.15  # more of others' work than this disturbs a measurement
PAUSE = 1.0  # seconds before a disturbed measurement is repeated
END_SECONDS = 20.0
# They would make engines spin while they wait, or keep them from it: each is run as it comes.
WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

T = TypeVar("T")


class EngineFailed(StoopError):
    """An engine could not be started, or failed."""


@dataclass(frozen=True)
class EngineSpec:
    """How to start one engine."""

    name: str  # in tables
    kind: str
    model: str  # what this engine loads
    options: dict[str, Any] = field(default_factory=dict)  # stoop's
    python: str = sys.executable
    asked: bool = True  # for: it must not be missing
    max_questions: int | None = None


def has_module(python: str, module: str, flag: str) -> bool:
    """Whether an interpreter has a module. flag: that named the interpreter"""
    # Finding a module is much faster than importing it.
    look = f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", look], capture_output=True).returncode == 0
    except OSError as error:
        raise ConfigError(
            f"{flag} {python} cannot be run ({error.strerror}): give the path of a Python "
            "interpreter"
        ) from None


class EngineProcess:
    """An engine in a process of its own. It sleeps until it is asked."""

    def __init__(self, spec: EngineSpec, context: int, threads: int | None) -> None:
        """context: tokens of the longest request; threads: None for stoop's choice"""
        self.spec = spec
        self.cpu_s = 0.0  # used until the last reply
        self._folder = tempfile.TemporaryDirectory(prefix="stoop-cpu-")
        self._log = Path(self._folder.name, "log")
        environment = {k: v for k, v in os.environ.items() if k not in WAIT_POLICIES}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        command = self._command()
        with self._log.open("w") as log:
            started = time.monotonic()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        try:
            loaded = self.ask(
                do="load",
                kind=spec.kind,
                model=spec.model,
                options=spec.options,
                context=context,
                threads=threads,
            )
        except BaseException:
            self.close()
            raise
        self.import_s = loaded["imported_at"] - started
        self.load_s = loaded["ready_at"] - loaded["imported_at"]
        self.version, self.threads = str(loaded["version"]), int(loaded["threads"])
        self.drafts = int(loaded["drafts"])

    def _command(self) -> list[str]:
        if self.spec.kind == STOOP:
            return [self.spec.python, "-m", cpu_worker.__name__]
        # Run a copy in a folder without modules: Python searches a program's own folder first, and
        # modules of this one must not shadow others of the same name.
        return [self.spec.python, shutil.copy(cpu_worker.__file__, self._folder.name)]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead, and the next line says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"{self.spec.name}: {self._how_it_ended()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{self.spec.name}: {reply['error']}")
        self.cpu_s = reply["cpu_s"]
        return reply

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        print("\n".join(lines[-NUM_LINES:]), file=sys.stderr)
        if status >= 0:
            return f"its process ended with status {status}: see its output above"
        name = signal.Signals(-status).name
        return f"its process was ended by {name}: see its output above"

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # closing twice does no harm
        self._folder.cleanup()


# ---- other processes ----


@dataclass(frozen=True)
class Watch:
    """Measures how many cores others used meanwhile. Its functions can be replaced in tests."""

    busy: Callable[[], float | None] = seconds_used
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    retries: int = 3

    def calmly(self, measure: Callable[[], tuple[T, float]]) -> tuple[T, float | None]:
        """Measure, again if others disturbed it; the least disturbed result and others' cores.

        measure: returns the result and the seconds that the engine itself computed
        """
        best: tuple[T, float | None] | None = None
        for attempt in range(self.retries + 1):
            if attempt:
                self.sleep(PAUSE)
            before, started = self.busy(), self.clock()
            found, own = measure()
            after, seconds = self.busy(), self.clock() - started
            if before is None or after is None:
                return found, None
            others = max(after - before - own, 0.0) / seconds
            if best is None or best[1] is None or others < best[1]:
                best = found, others
            if others <= BUSY_CORES:
                break
        assert best is not None
        return best


def start_engine(
    spec: EngineSpec, context: int, threads: int | None, watch: Watch
) -> tuple[EngineProcess, float | None]:
    """Start an engine, the second time for the clock: the first fills caches and builds kernels.

    Also returns the cores that others used meanwhile.
    """
    EngineProcess(spec, context, threads).close()
    running: list[EngineProcess] = []

    def start() -> tuple[EngineProcess, float]:
        if running:
            running.pop().close()
        process = EngineProcess(spec, context, threads)
        running.append(process)
        return process, process.cpu_s

    # The last start stays up, so only it can count.
    for left in range(watch.retries, -1, -1):
        process, others = replace(watch, retries=0).calmly(start)
        if others is None or others <= BUSY_CORES or not left:
            break
        watch.sleep(PAUSE)
    return process, others
