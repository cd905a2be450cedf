"""Run everything that a GPU must prove: the GPU tests and `stoop check`, several at a time.

Most of the time goes into compiling kernels, on one core each, so that processes which share the
GPU end much sooner than one after another. Each has a log in --out. A process that takes too long
is stopped and named; the others go on.

    python tools/check_gpu.py --jobs 8 --out logs
    python tools/check_gpu.py --only tiny --backends triton --out logs
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_TESTS = 5  # pytest's exit code: the file was skipped as a whole
PASSED = re.compile(r"^\d+ passed", re.MULTILINE)
BY_TEST = ("test_graphs_cuda", "test_hybrid_cuda")  # files whose tests take a minute or two each
# The options of pyproject.toml but for a second -q, with which it would not say how many passed.
OPTIONS = "addopts=--strict-markers --import-mode=importlib"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-o", OPTIONS)
HEADS = {
    "tiny": '{"method": "eagle3", "model": "tiny", "num_speculative_tokens": 3}',
    "tiny-qwen3.5": '{"method": "mtp", "num_speculative_tokens": 3}',
    "tiny-lfm2": '{"method": "ngram", "num_speculative_tokens": 3}',
    "tiny-granite-h": '{"method": "ngram", "num_speculative_tokens": 3}',
}


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    job: Job
    seconds: float
    status: str  # passed, skipped, failed or too slow
    last_line: str


def list_jobs(backends: str | None = None) -> list[Job]:
    """The longest first, so that none is left over at the end."""
    python = sys.executable
    jobs = [job for stem in BY_TEST for job in list_tests(stem)]
    jobs.append(Job("mutants", (python, "-m", "stoop", "check", "--mutants")))
    for model, head in HEADS.items():
        check: tuple[str, ...] = (python, "-m", "stoop", "check", model)
        if backends:
            check += ("--backends", backends)
        jobs.append(Job(f"{model} with drafts", (*check, "-sc", head)))
        jobs.append(Job(model, check))
    for path in sorted((ROOT / "tests/gpu").glob("test_*.py")):
        if path.stem not in BY_TEST:
            jobs.append(Job(path.stem, (*PYTEST, str(path))))
    return jobs


def list_tests(stem: str) -> list[Job]:
    """Each test of a file, the last ones first: quick tests come first in a file."""
    path = f"tests/gpu/{stem}.py"
    command = (*PYTEST, "--collect-only", path)
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    tests = [line for line in found.stdout.splitlines() if line.startswith(f"{path}::")]
    names = [f"{stem}: {test.split('::')[1].removeprefix('test_')}" for test in tests]
    jobs = [Job(name, (*PYTEST, test)) for name, test in zip(names, tests, strict=True)]
    return jobs[::-1] or [Job(stem, (*PYTEST, path))]  # it shows what is wrong


def run(job: Job, folder: Path, seconds: float) -> Outcome:
    log = folder / f"{re.sub(r'[^a-zA-Z0-9_.]+', '-', job.name).strip('-')}.log"
    started, code = time.monotonic(), None
    with log.open("w") as out, contextlib.suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            job.command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, timeout=seconds
        ).returncode
    text = log.read_text(errors="replace").strip()
    last_line = text.splitlines()[-1] if text else ""
    return Outcome(job, time.monotonic() - started, _status(job, code, text), last_line)


def _status(job: Job, code: int | None, log: str) -> str:
    if code is None:
        return "too slow"
    if "pytest" in job.command and (code == NO_TESTS or (code == 0 and not PASSED.search(log))):
        return "skipped"
    return "failed" if code else "passed"


def run_all(jobs: list[Job], folder: Path, at_once: int, seconds: float) -> list[Outcome]:
    """Prints each outcome as it comes. seconds: for each job"""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with ThreadPoolExecutor(at_once) as pool:
        for done in as_completed([pool.submit(run, job, folder, seconds) for job in jobs]):
            found = done.result()
            outcomes.append(found)
            print(
                f"{found.status:8} {found.seconds:6.0f} s  {found.job.name}: "
                f"{found.last_line[:100]}",
                flush=True,
            )
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU tests and stoop check, several at a time")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--only", default="", help="jobs with this in the model's or file's name")
    parser.add_argument("--backends", help="attention backends of stoop check; all by default")
    parser.add_argument("--out", type=Path, default=Path("gpu-logs"), help="folder of the logs")
    parser.add_argument("--seconds", type=float, default=1800, help="for each job")
    given = parser.parse_args()
    jobs = [job for job in list_jobs(given.backends) if given.only in job.name.split(":")[0]]
    if not jobs:
        names = ", ".join(job.name for job in list_jobs(given.backends))
        parser.error(f"--only {given.only!r} leaves no job: there are {names}")
    outcomes = run_all(jobs, given.out, given.jobs, given.seconds)
    bad = [each.job.name for each in outcomes if each.status not in ("passed", "skipped")]
    num_skipped = sum(each.status == "skipped" for each in outcomes)
    told = f"{len(outcomes) - num_skipped} passed, {num_skipped} skipped"
    if bad:
        told = f"not passed: {', '.join(bad)} (logs in {given.out})"
    print(f"{len(outcomes)} jobs, {told}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
