"""What the host does for each step and each prompt, with nothing computed.

    python tools/bench_host.py --load 64,256 --k 0,3

A small step of many requests, on a fast GPU, waits for the host: this is how long. The phases are
left out: each request gets one token a step, and one draft is accepted if there are any. Times of
a step are medians, those of prompts sums; of each the best of several rounds. The last line is
JSON.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from stoop import LLM, SamplingParams
from stoop.batch.input_batch import InputBatch
from stoop.check.graphs import TINY, tiny_model
from stoop.engine.frontend import Frontend
from stoop.scheduler.scheduler import Scheduler
from stoop.worker.device import exempt_from_collection
from stoop.worker.executor import Step
from stoop.worker.output import LaunchedStep, StepOutput
from stoop.worker.runner import ModelRunner

TOKEN = 7
BLOCK_SIZE = 16
PARTS = {
    "schedule": Scheduler,
    "prepare": ModelRunner,
    "result": LaunchedStep,
    "update": Scheduler,
    "absorb": Frontend,
}


def make_verdict(runner: ModelRunner, step: Step) -> StepOutput:
    """Instead of the phases: as if one draft of each request had been accepted."""
    batch, verdict = step.batch, runner.outputs.verdict
    rows = slice(0, batch.num_reqs)
    num_drafts = _num_drafts(batch)
    verdict.num_tokens[rows] = 1 + min(num_drafts, 1)
    verdict.token_ids[rows] = TOKEN
    verdict.num_drafts[rows] = num_drafts
    runner.draft_seconds = 0.0
    return runner.outputs.send()


def _num_drafts(batch: InputBatch) -> int:
    first = batch.plan_rows[0]
    return first.num_tokens - 1 if all(row.decodes for row in batch.plan_rows) else 0


@contextmanager
def timed(seconds: dict[str, list[float]]) -> Iterator[None]:
    """Note what every call of the parts takes."""

    def wrap(name: str, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                seconds[name].append(time.perf_counter() - started)

        return call

    patches = [
        patch.object(owner, name, wrap(name, getattr(owner, name))) for name, owner in PARTS.items()
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def serve(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[list[float], float]:
    """Seconds of each step, and until all requests were queued."""
    params, engine = SamplingParams(temperature=0, max_tokens=num_tokens), llm.engine
    params = params.replace(ignore_eos=True)
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params, final_only=True)
    queued, steps, num_ended = time.perf_counter() - started, list[float](), 0
    while num_ended < len(prompts):
        started = time.perf_counter()
        num_ended += len(engine.step())
        steps.append(time.perf_counter() - started)
    return steps, queued


def measure(load: int, k: int, prompt_len: int, output_len: int, rounds: int) -> dict[str, Any]:
    spec = {"method": "eagle3", "model": "tiny", "num_speculative_tokens": k, "adaptive": False}
    engine: dict[str, Any] = {"device": "cpu"} | ({"speculative_config": spec} if k else {})
    length = prompt_len + output_len + 2 * k
    with tiny_model(TINY, engine) as (folder, options):
        sizes = {"max_num_seqs": load, "max_num_batched_tokens": 8192, "max_model_len": length}
        options |= {"graph_mode": "none", "run_ahead": 1, "skip_tokenizer_init": True}
        options["enable_prefix_caching"] = False  # the rounds have the same prompts
        num_blocks = load * (length // BLOCK_SIZE + 2)
        llm = LLM(folder, **{**options, **sizes, "num_kv_blocks": num_blocks})
    prompts = [[(7 * i + j) % 97 for j in range(prompt_len)] for i in range(load)]
    exempt_from_collection(llm.engine)  # as on a GPU
    record: dict[str, Any] = {"load": load, "k": k}
    with patch.object(ModelRunner, "run", make_verdict):
        whole = [statistics.median(serve(llm, prompts, output_len)[0]) for _ in range(rounds)]
        record["step_us"] = 1e6 * min(whole)
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            seconds: dict[str, list[float]] = defaultdict(list)
            with timed(seconds):
                serve(llm, prompts, output_len)
            for name in PARTS:
                found[name].append(statistics.median(seconds[name]))
        record |= {f"{name}_us": 1e6 * min(each) for name, each in found.items()}
        every = [serve(llm, prompts, 1) for _ in range(rounds)]
        record["prompts_ms"] = 1e3 * min(sum(steps) + queued for steps, queued in every)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="the host's time of steps and prompts")
    parser.add_argument("--load", default="64,256", help="requests at once, one or more")
    parser.add_argument("--k", default="0,3", help="drafts per step, one or more; 0 is none")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    records = []
    print("requests  K   a step (us):", *PARTS, "  prompts (ms)")
    for load in map(int, given.load.split(",")):
        for k in map(int, given.k.split(",")):
            record = measure(load, k, given.input_len, given.output_len, given.rounds)
            parts = " ".join(f"{record[f'{name}_us']:.0f}" for name in PARTS)
            shown = f"{record['step_us']:.0f}: {parts}"
            print(f"{load:8}  {k}   {shown:32}  {record['prompts_ms']:.1f}", flush=True)
            records.append(record)
    print(json.dumps(records))


if __name__ == "__main__":
    main()
