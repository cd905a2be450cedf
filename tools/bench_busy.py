"""Start-up and answer speed on idle cores, on cores shared with busy programs, and on one core.

    python tools/bench_busy.py --load 4 --rounds 3

The busy programs run in their own session, as if from another terminal, or in this one. Each round
runs `stoop generate` once per setting. The last line is JSON. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import re
import signal
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
def busy(num_programs: int, own_session: bool, nice: int) -> Iterator[None]:
    """Run programs that keep cores busy until the block ends."""
    programs = []
    if num_programs:
        loop = f"nice -n {nice} {sys.executable} -c '{BURN}' & "
        command = ["sh", "-c", loop * num_programs + "wait"]
        # A process group, to kill them all at once; a new session has one, too.
        group = None if own_session else 0
        programs = [subprocess.Popen(command, start_new_session=own_session, process_group=group)]
        time.sleep(1)
    try:
        yield
    finally:
        for program in programs:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def run(arguments: list[str], threads: int | None = None) -> tuple[float, float, float]:
    """Return seconds until ready as reported by stoop, seconds in total, and tokens/s."""
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
    parser.add_argument("--nice", type=int, default=0, help="how far to lower their priority")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", choices=["auto", "none"], default="auto")
    options = parser.parse_args()
    arguments = ["-sc", options.drafts]
    settings: dict[str, tuple[int, bool, int | None]] = {
        "idle": (0, True, None),
        "busy": (options.load, True, None),
        "busy, same session": (options.load, False, None),
        "one idle core": (0, True, 1),
    }
    run(arguments)  # downloads, converts and warms the file cache
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in settings}
    for _ in range(options.rounds):
        for name, (load, own_session, threads) in settings.items():
            with busy(load, own_session, options.nice):
                found[name].append(run(arguments, threads))
    rows = {}
    for name, runs in found.items():
        ready, seconds, speed = (
            round(statistics.median(column), 2) for column in zip(*runs, strict=True)
        )
        rows[name] = {"ready_s": ready, "whole_run_s": seconds, "tokens_per_s": speed}
        print(f"{name:>18}: ready in {ready} s, whole run {seconds} s, {speed} tokens/s")
    idle, one_core = rows["idle"]["ready_s"], rows["one idle core"]["tokens_per_s"]
    for name in ("busy", "busy, same session"):
        rows[name]["ready_over_idle"] = round(rows[name]["ready_s"] / idle, 2)
        rows[name]["speed_over_one_core"] = round(rows[name]["tokens_per_s"] / one_core, 2)
    setting = {
        "load": options.load,
        "nice": options.nice,
        "cores": os.cpu_count(),
        "drafts": options.drafts,
    }
    print(json.dumps({**setting, **rows}))


if __name__ == "__main__":
    main()
