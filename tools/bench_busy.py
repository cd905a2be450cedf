"""A start and an answer on idle cores, beside programs that keep them busy, and on one idle core.

    python tools/bench_busy.py --load 4 --rounds 3

Each round runs `stoop generate` once in each setting. The last line is JSON. Run it on a machine
that does nothing else.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PROMPT = "Write a Python function that checks whether a word is a palindrome."
BURN = "while True: pass"
READY = re.compile(r"ready in ([\d.]+) s")
SPEED = re.compile(r"tokens in [\d.]+ s: ([\d.]+) tokens/s")


@contextmanager
def busy(num_programs: int) -> Iterator[None]:
    """So many programs that never rest."""
    programs = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(num_programs)]
    try:
        time.sleep(1 if programs else 0)
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def run(arguments: list[str], threads: int | None = None) -> tuple[float, float, float]:
    """Seconds until ready as stoop reports it, seconds in all, and tokens/s."""
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-m", "stoop", "generate", "--chat", "-p", PROMPT]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--max-tokens", "96", *arguments],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    ready, speed = READY.search(done.stderr), SPEED.search(done.stderr)
    assert ready and speed, done.stderr
    return float(ready[1]), seconds, float(speed[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=int, default=4, help="programs that keep cores busy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", choices=["auto", "none"], default="auto")
    options = parser.parse_args()
    arguments = ["-sc", options.drafts]
    settings = {"idle": (0, None), "busy": (options.load, None), "one idle core": (0, 1)}
    run(arguments)  # fetches, converts and warms the file cache
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in settings}
    for _ in range(options.rounds):
        for name, (load, threads) in settings.items():
            with busy(load):
                found[name].append(run(arguments, threads))
    rows = {}
    for name, runs in found.items():
        ready, seconds, speed = (
            round(statistics.median(column), 2) for column in zip(*runs, strict=True)
        )
        rows[name] = {"ready_s": ready, "whole_run_s": seconds, "tokens_per_s": speed}
        print(f"{name:>14}: ready in {ready} s, whole run {seconds} s, {speed} tokens/s")
    report = {
        "load": options.load,
        "cores": os.cpu_count(),
        "drafts": options.drafts,
        **rows,
        "ready_busy_over_idle": round(rows["busy"]["ready_s"] / rows["idle"]["ready_s"], 2),
        "speed_busy_over_one_core": round(
            rows["busy"]["tokens_per_s"] / rows["one idle core"]["tokens_per_s"], 2
        ),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
