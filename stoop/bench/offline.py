"""Offline benchmarks: all requests arrive at the start.

Prompts are random token ids, different in every run, so that the prefix cache finds nothing.
"""

import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoop.config.errors import ConfigError
from stoop.config.schema import Config
from stoop.core.outputs import DecodeSteps, RequestOutput
from stoop.core.sampling_params import SamplingParams
from stoop.llm import LLM


@dataclass(frozen=True)
class Load:
    """Requests of equal length."""

    num_requests: int
    input_len: int
    output_len: int


@dataclass
class TokenTimes:
    """The times of a request's tokens, in seconds since its arrival."""

    arrival: float
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0]

    @property
    def gaps(self) -> list[float]:
        return list(np.diff(self.times))


@dataclass(frozen=True)
class RunResult:
    """One run of a load."""

    load: Load
    seconds: float
    requests: list[TokenTimes]
    steps: DecodeSteps

    @property
    def num_tokens(self) -> int:
        return sum(len(request.times) for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class LatencyResult:
    """Repeated runs of a load, with those of a peer."""

    load: Load
    runs: list[RunResult]
    peer_tokens_per_s: list[float]  # transformers, in alternating runs
    weight_bytes: int  # read once per step
    dtype: str

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def peer(self) -> float | None:
        return statistics.median(self.peer_tokens_per_s) if self.peer_tokens_per_s else None


def measure_throughput(llm: LLM, load: Load) -> RunResult:
    check_length(llm.config, load)
    run(llm, Load(min(2, load.num_requests), load.input_len, 4))  # warm-up
    return run(llm, load)


def measure_latency(
    llm: LLM, loads: list[Load], repeat: int, with_transformers: bool
) -> list[LatencyResult]:
    """Measure every load. Runs alternate between engines, so that noise affects both alike."""
    peer = TransformersPeer(llm) if with_transformers else None
    config = llm.config
    weight_bytes = sum(p.numel() * p.element_size() for p in llm.engine.runner.model.parameters())
    results = []
    for load in loads:
        check_length(llm.config, load)
        runs, peer_speeds = [], []
        run(llm, Load(load.num_requests, load.input_len, 4))
        if peer:
            peer.run(Load(load.num_requests, load.input_len, 4))
        for _ in range(repeat):
            runs.append(run(llm, load))
            if peer:
                peer_speeds.append(peer.run(load))
        results.append(LatencyResult(load, runs, peer_speeds, weight_bytes, config.device.dtype))
    return results


def measure_modes(llms: dict[str, LLM], loads: list[Load], repeat: int) -> dict[str, list[float]]:
    """Return median seconds between tokens by mode and load; every round runs every mode."""
    gaps: dict[str, list[list[float]]] = {mode: [[] for _ in loads] for mode in llms}
    for turn in range(repeat + 1):
        for place, load in enumerate(loads):
            for mode, llm in llms.items():
                result = run(llm, load)
                if turn:  # the first round warms up
                    gaps[mode][place] += [gap for each in result.requests for gap in each.gaps]
    return {mode: [statistics.median(each) for each in columns] for mode, columns in gaps.items()}


def run(llm: LLM, load: Load) -> RunResult:
    """Generate for all requests at once and record the time of each token."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=load.output_len, ignore_eos=True)
    requests, last = dict[str, TokenTimes](), dict[str, RequestOutput]()
    started = time.perf_counter()
    for index, prompt in enumerate(random_prompts(llm, load)):
        request_id = f"bench-{index}"
        engine.add_request(request_id, prompt, params)
        requests[request_id] = TokenTimes(started)
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            last[output.request_id] = output
            request = requests[output.request_id]
            new = len(output.outputs[0].token_ids) - len(request.times)
            request.times += [now - request.arrival] * new
    seconds = time.perf_counter() - started
    return RunResult(load, seconds, list(requests.values()), DecodeSteps.of(last.values()))


def random_prompts(llm: LLM, load: Load, seed: int | None = None) -> list[list[int]]:
    """Without a seed, others each time."""
    source = random.Random(time.perf_counter_ns() if seed is None else seed)
    vocab_size = llm.config.model.vocab_size
    return [
        [source.randrange(vocab_size) for _ in range(load.input_len)]
        for _ in range(load.num_requests)
    ]


def check_length(config: Config, load: Load) -> None:
    limit = config.schedule.max_model_len
    if load.input_len + load.output_len > limit:
        raise ConfigError(
            f"{load.input_len} prompt tokens plus {load.output_len} answer tokens exceed "
            f"max_model_len={limit}: lower one of them or raise max_model_len"
        )


class TransformersPeer:
    """Hugging Face `generate` on the same checkpoint, device and dtype."""

    def __init__(self, llm: LLM) -> None:
        import torch
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        config = llm.config
        if config.load.dummy:
            raise ConfigError("--peer transformers needs real weights: leave load_format at auto")
        self.llm = llm
        self.torch: Any = torch
        dtype = getattr(torch, config.device.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(config.load.folder, dtype=dtype)
        self.model = model.to(config.device.device)

    def run(self, load: Load) -> float:
        """Run a load and return tokens/s."""
        ids = self.torch.tensor(random_prompts(self.llm, load), device=self.model.device)
        started = time.perf_counter()
        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=load.output_len,
                min_new_tokens=load.output_len,
                do_sample=False,
            )
            num_tokens = (out.shape[1] - load.input_len) * load.num_requests
            out.tolist()  # wait for the device
        return num_tokens / (time.perf_counter() - started)
