"""The stage that makes data: one engine answers in this process, or several in processes of theirs.

A step of a small target takes the host longer than the GPU, which several workers share well.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

import torch

from stoop.config.errors import ConfigError
from stoop.core.kv_layout import DTYPE_BYTES
from stoop.llm import LLM
from stoop.text.prompts import read_prompts
from stoop.train.answers import Share, make_data, read_inventions
from stoop.train.job import Job
from stoop.train.settings import Deadline, Say
from stoop.train.shards import check_origin, origin_of
from stoop.worker.device import find_device

FREE_SHARE, TOTAL_SHARE = 0.85, 0.88  # of memory, for all workers; whichever is less
WORK_BYTES = 4 * 2**30  # that a worker needs beside weights and KV


def run_data(job: Job, prompt_files: Sequence[Path]) -> None:
    settings = job.settings
    if not prompt_files and not settings.data.invent:
        raise ConfigError("there are no prompts: give --prompts FILE, --invent N, or both")
    before, count = read_inventions(job.data), settings.data.workers
    if count == 1:
        answer(job, prompt_files, Share(0, 1, before))
        return
    check_origin(job.data, origin_of(job.target, settings.seed))
    shares = [Share(worker, count, before) for worker in range(count)]
    _answer_side_by_side(_with_memory_shared(job), prompt_files, shares)


def answer(job: Job, prompt_files: Sequence[Path], share: Share) -> None:
    settings = job.settings
    deadline = Deadline(settings.time_budget)
    conversations = [each for path in prompt_files for each in read_prompts(path)]
    config = job.config()
    llm = LLM(
        job.target,
        device=config.device.device,
        dtype=config.device.dtype,
        max_model_len=config.schedule.max_model_len,
        max_num_seqs=config.schedule.max_num_seqs,
        kv_cache_memory=settings.data.kv_cache_memory,
        seed=settings.seed,
        speculative_config=None,
    )
    make_data(llm, job.data, conversations, settings.data, settings.seed, deadline, job.say, share)
    if deadline.over:
        job.say("data: stopped by --time-budget; the same command goes on from here")


def _with_memory_shared(job: Job) -> Job:
    """Workers that measured what is free would each see what others take at that moment."""
    data, device = job.settings.data, find_device(job.settings.device)
    if device == "cpu" or data.kv_cache_memory is not None:
        return job
    config = job.config()
    free, total = torch.cuda.mem_get_info(device)
    most = min(FREE_SHARE * free, free - (1 - TOTAL_SHARE) * total)
    weights = config.model.num_params * DTYPE_BYTES[config.device.dtype]
    room = int(most / data.workers) - weights - WORK_BYTES
    if room <= 0:
        raise ConfigError(
            f"--workers {data.workers} do not fit into the {free / 2**30:.0f} GiB that are free: "
            "use fewer"
        )
    data = replace(data, kv_cache_memory=str(room))
    return replace(job, settings=replace(job.settings, data=data))


# ---- processes ----


def _answer_side_by_side(job: Job, prompt_files: Sequence[Path], shares: Sequence[Share]) -> None:
    """One that fails does not stop the others."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(job, tuple(prompt_files), share)) for share in shares
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, signal.SIGINT)  # it keeps what it has
                worker.join()
    failed = {number: worker.exitcode for number, worker in enumerate(workers) if worker.exitcode}
    if failed:
        found = ", ".join(f"{number} with status {code}" for number, code in failed.items())
        raise ConfigError(
            f"--workers: of {len(workers)}, these ended early: {found}; what they said is above, "
            "and the same command goes on from here"
        )


def _work(job: Job, prompt_files: tuple[Path, ...], share: Share) -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()
    if find_device(job.settings.device) == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // share.num_workers))
    try:
        answer(replace(job, say=_Numbered(share.worker, job.say)), prompt_files, share)
    except ConfigError as error:
        job.say(f"worker {share.worker}: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _follow_parent() -> None:
    """Nobody is to go on writing when the next run begins."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGINT)


@dataclass(frozen=True)
class _Numbered:
    """Lines of a worker, told from those of others."""

    worker: int
    say: Say

    def __call__(self, line: str) -> None:
        self.say(f"[{self.worker}] {line}")
