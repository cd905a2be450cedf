"""The data stage: one engine answers in this process, or several in processes of their own.

A small target's step takes longer on the host than on the GPU, so several workers share a GPU well.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from stoop.config.errors import ConfigError, StoopError
from stoop.llm import LLM
from stoop.text.prompts import read_prompts
from stoop.train.answers import Share, make_data, read_inventions
from stoop.train.interrupts import ctrl_c_ignored, interruptible
from stoop.train.job import Job
from stoop.train.origin import describe, discard_data, settle_origin
from stoop.train.progress import Combined, Progress
from stoop.train.settings import Deadline
from stoop.train.shards import read_counts
from stoop.worker.device import find_device
from stoop.worker.memory import weight_bytes

FREE_SHARE, TOTAL_SHARE = 0.85, 0.88  # of memory, for all workers; the smaller result applies
WORK_BYTES = 4 * 2**30  # per worker, besides weights and KV


def run_data(job: Job, prompt_files: Sequence[Path]) -> None:
    """Make data; an interrupt is raised again with a message that says what is kept."""
    settings = job.settings
    if not prompt_files and not settings.data.invent:
        raise ConfigError("there are no prompts: give --prompts FILE, --invent N, or both")
    origin = describe(job, prompt_files)  # may raise, so it comes before data is discarded
    if job.fresh_data:
        discard_data(job)
    settle_origin(job, origin)
    job.note_command()
    job.say(f"data: starting {job.target}")
    before, count = read_inventions(job.data), settings.data.workers
    shares = [Share(worker, count, before) for worker in range(count)]
    try:
        with interruptible():
            if count == 1:
                answer(job, prompt_files, shares[0])
            else:
                _answer_side_by_side(_with_memory_shared(job), prompt_files, shares)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(job)) from None


def _kept(job: Job) -> str:
    """Say what an interrupted run keeps and how to continue it."""
    counts = {
        "answer": read_counts(job.data)["answers"],
        "invented prompt": len(read_inventions(job.data).texts),
    }
    kept = [f"{n:,} {name}{'s' * (n != 1)}" for name, n in counts.items() if n]
    if not kept:
        return f"data: interrupted before the first answer was done; {job.again()}"
    return f"data: interrupted, keeping {' and '.join(kept)}; {job.again()}"


def answer(job: Job, prompt_files: Sequence[Path], share: Share) -> None:
    """Start an engine and generate a worker's share of the data."""
    settings = job.settings
    deadline = Deadline(settings.time_budget)
    conversations = [each for path in prompt_files for each in read_prompts(path)]
    config = job.config()

    def report(stage: str, done: int, total: int | None) -> None:
        job.show(Progress(stage, done, total))

    llm = LLM(
        job.target,
        report=report,
        device=config.device.device,
        dtype=config.device.dtype,
        max_model_len=config.schedule.max_model_len,
        max_num_seqs=config.schedule.max_num_seqs,
        kv_cache_memory=settings.data.kv_cache_memory,
        seed=settings.seed,
        speculative_config=None,
    )
    job.show(None)
    seed = settings.seed
    make_data(llm, job.data, conversations, settings.data, seed, deadline, job.teller, share)
    if deadline.over:
        job.say(f"data: stopped by --time-budget; {job.again()}")


def _with_memory_shared(job: Job) -> Job:
    """Set the workers' KV cache size here: measured by each, free memory would depend on timing."""
    data, device = job.settings.data, find_device(job.settings.device)
    if device == "cpu" or data.kv_cache_memory is not None:
        return job
    config = job.config()
    free, total = torch.cuda.mem_get_info(device)
    most = min(FREE_SHARE * free, free - (1 - TOTAL_SHARE) * total)
    weights = weight_bytes(config)
    room = int(most / data.workers) - weights - WORK_BYTES
    if room <= 0:
        raise ConfigError(
            f"--workers {data.workers} do not fit into the {free / 2**30:.0f} GiB of free memory: "
            "use fewer"
        )
    data = replace(data, kv_cache_memory=str(room))
    return replace(job, settings=replace(job.settings, data=data))


# ---- processes ----


def _answer_side_by_side(job: Job, prompt_files: Sequence[Path], shares: Sequence[Share]) -> None:
    """Run a process per share; a worker that fails does not stop the others."""
    context = multiprocessing.get_context("spawn")
    workers: list[SpawnProcess] = []
    ends: dict[Connection, int] = {}  # our end of each worker's pipe
    combined = Combined(job.show)
    try:
        for share in shares:
            ours, theirs = context.Pipe(duplex=False)
            sender = replace(job, say=_SendLine(theirs), show=_SendProgress(theirs))
            args = (sender, tuple(prompt_files), share)
            workers.append(context.Process(target=_work, args=args))
            with ctrl_c_ignored():  # by the worker: a terminal sends it to all processes
                workers[-1].start()
            theirs.close()  # only the worker holds its end, so the pipe closes with the worker
            ends[ours] = share.worker
        _relay(ends, job, combined)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()  # the worker saves its answers first
        _relay(ends, job, combined)
        for worker in workers:
            worker.join()
    failed = {number: worker.exitcode for number, worker in enumerate(workers) if worker.exitcode}
    if failed:
        found = ", ".join(f"{number} with status {code}" for number, code in failed.items())
        raise ConfigError(
            f"--workers: of {len(workers)}, these failed: {found}; see their output above; "
            f"{job.again()}"
        )


def _relay(ends: dict[Connection, int], job: Job, combined: Combined) -> None:
    """Pass on lines and progress from workers until all have ended."""
    while ends:
        for end in wait(list(ends)):
            assert isinstance(end, Connection)
            try:
                sent = end.recv()
            except (EOFError, OSError):
                combined(ends.pop(end), None)
                continue
            if isinstance(sent, str):
                job.say(f"[{ends[end]}] {sent}")
            else:
                combined(ends[end], sent)


@dataclass(frozen=True)
class _Sender:
    """Sends to the parent; callable objects, since processes cannot share closures."""

    end: Connection

    def _send(self, sent: str | Progress | None) -> None:
        with suppress(OSError):  # the parent has ended, and this worker is about to
            self.end.send(sent)


class _SendLine(_Sender):
    def __call__(self, line: str) -> None:
        self._send(line)


class _SendProgress(_Sender):
    def __call__(self, progress: Progress | None) -> None:
        self._send(progress)


def _work(job: Job, prompt_files: tuple[Path, ...], share: Share) -> None:
    try:
        with interruptible():
            threading.Thread(target=_follow_parent, daemon=True).start()
            if find_device(job.settings.device) == "cpu":
                torch.set_num_threads(max(1, torch.get_num_threads() // share.num_workers))
            answer(job, prompt_files, share)
    except StoopError as error:
        job.say(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _follow_parent() -> None:
    """End this worker when its parent ends, so that it does not write during the next run."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
