"""The largest step, run once without requests: how much memory it takes, which GEMMs it has."""

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from stoop.batch.input_batch import InputBatch
from stoop.config.schema import Config
from stoop.core.request import TokenRules
from stoop.core.sampling_kind import SamplingKind
from stoop.core.sampling_params import SamplingParams
from stoop.core.step import PlannedRow
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.ops.kernels.linear_choice import LinearShape, recording
from stoop.sampling.sampler import SamplingNeeds
from stoop.worker.executor import PhaseExecutor, Step
from stoop.worker.target import Target, TargetLane

log = logging.getLogger(__name__)

TIMED_RUNS = 3


def measure_work_bytes(target: Target, executor: PhaseExecutor, config: Config) -> int:
    """Memory to keep free of KV: a step's, and as much again for the pool of the graphs."""
    peak = _measure_peak_bytes(target, executor, config)
    return peak if config.graph.mode == "none" else 2 * peak


@torch.inference_mode()
def _measure_peak_bytes(target: Target, executor: PhaseExecutor, config: Config) -> int:
    """Memory that the largest step takes beside weights and KV; only a GPU is measured."""
    device = target.device
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_dummy_step(target, executor, config)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def find_products(target: Target, executor: PhaseExecutor, config: Config) -> list[LinearShape]:
    """The GEMMs of a step, to be measured by `stoop tune`."""
    with recording() as found:
        run_dummy_step(target, executor, config)
    return list(found)


@torch.inference_mode()
def run_dummy_step(target: Target, executor: PhaseExecutor, config: Config) -> None:
    """A step of the largest size whose rows are all padding: only the null block is read."""
    schedule = config.schedule
    max_reqs, max_tokens = schedule.max_num_seqs, schedule.max_num_batched_tokens
    lengths = np.full(max_reqs, max_tokens // max_reqs, dtype=np.int64)
    lengths[: max_tokens % max_reqs] += 1
    lengths = lengths.clip(max=schedule.max_model_len)
    rows, step = target.buffers.rows, target.buffers.step
    step.slot_mapping.fill_(-1)
    step.row_slots.fill_(target.state.tensors.sink)
    step.seq_lens.copy_(torch.from_numpy(lengths))
    rows.query_start_loc[1:].copy_(torch.from_numpy(lengths.cumsum()))
    target.buffers.forget_rows()
    batch = InputBatch(
        plan_rows=[],
        num_reqs=max_reqs,
        num_tokens=int(lengths.sum()),
        num_reqs_padded=max_reqs,
        num_tokens_padded=int(lengths.sum()),
        query_lens_cpu=lengths,
        query_len=None,
        seq_lens_cpu_upper_bound=lengths,
        rows=rows,
        step=step,
    )
    needs = SamplingNeeds(noise=True, top_p=True, penalties=True)
    descriptor = BatchExecutionDescriptor(RunMode.NONE, batch.num_tokens, max_reqs)
    metadata = target.model_state.prepare_attn(batch)
    # Inputs are made above, and no slot is to be updated.
    whole = Step(batch, descriptor, metadata, needs, executor.max_drafts)
    executor.run_phases(whole, skip="IU")


@torch.inference_mode()
def time_decodes(lane: TargetLane, executor: PhaseExecutor) -> dict[tuple[int, int], float]:
    """Seconds of every captured decode step, by number of requests and number of drafts.

    No row has a request, so what attention takes is left out.
    """
    found, target = {}, lane.target
    sink, rules = target.state.tensors.sink, TokenRules(SamplingParams(), seed=0, max_tokens=1)
    with executor.unwatched():
        for descriptor in lane.descriptors:
            sampling, query_len = descriptor.sampling, descriptor.query_len
            if query_len is None or descriptor.mode < RunMode.FULL or descriptor.masked:
                continue
            if sampling not in (None, SamplingKind.GREEDY) or descriptor.num_reqs is None:
                continue
            row = PlannedRow("", -1, sink, query_len, 0, query_len, 0, True, True, rules, 0)
            rows, num_reqs = [row] * descriptor.num_reqs, descriptor.num_reqs
            batch = target.buffers.load_rows(rows, num_reqs, descriptor.num_tokens, query_len)
            target.inputs()
            metadata = target.model_state.prepare_attn(batch)
            needs = SamplingNeeds.of_kind(sampling or SamplingKind.GREEDY)
            step = Step(batch, descriptor, metadata, needs, query_len - 1)
            found[descriptor.num_reqs, query_len - 1] = _time(
                partial(executor.run, step), target.device
            )
    target.buffers.forget_rows()
    return found


def _time(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of one run of several that follow each other."""
    run()
    _wait(device)
    started = time.perf_counter()
    for _ in range(TIMED_RUNS):
        run()
    _wait(device)
    return (time.perf_counter() - started) / TIMED_RUNS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def follow_measured_products(device: torch.device) -> None:
    """Let what `stoop tune` measured on this GPU choose the kernels of GEMMs with few tokens."""
    from stoop.ops.kernels.linear_tuning import follow_measured

    count = follow_measured(device)
    how = f"{count} measured here" if count else "by rules, until `stoop tune` measures them"
    log.info("matrix products of few tokens: %s", how)
