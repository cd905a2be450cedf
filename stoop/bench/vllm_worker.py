"""Measures vLLM: milliseconds per step by batch size, and to the first token by prompt length; or,
for a task with groups of requests, tokens per second.

This is a separate program that runs in a Python with vLLM, which may not have stoop, so it imports
nothing from stoop. It reads its task as JSON from standard input and prints the result as a JSON
line with a prefix, among the lines that vLLM prints.

For the time of a step, each batch runs twice, with few tokens and with more. The difference in time
over the difference in steps is the time of a step: prompts and start-up cancel out.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MARK = "peer: "
FEW_TOKENS = 24
WARM_TOKENS = 8
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class Peer:
    """A vLLM engine and its measurements."""

    def __init__(self, task: dict[str, Any], folder: Path) -> None:
        import vllm

        self.task = task
        self.params = vllm.SamplingParams
        self.source = random.Random(0)
        num_drafts = task["k"]
        exact = [batch * (num_drafts + 1) for batch in task["batch"]]
        options: dict[str, Any] = {
            "model": _write(folder / "target", task["target"]),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": task["max_model_len"],
            "max_num_seqs": max(64, *task["batch"]),
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.8,
            "enable_prefix_caching": False,
            "disable_log_stats": False,  # they count accepted drafts
            # A graph of each batch's exact size, as in stoop.
            "compilation_config": {"cudagraph_capture_sizes": sorted({*GRAPH_SIZES, *exact})},
        }
        if num_drafts:
            options["speculative_config"] = {
                "method": "eagle3",
                "model": _write(folder / "head", task["head"]),
                "num_speculative_tokens": num_drafts,
            }
        started = time.perf_counter()
        self.llm: Any = vllm.LLM(**options)
        self.start_s = time.perf_counter() - started
        self.version = vllm.__version__

    def step_ms(self, batch: int) -> float:
        self._generate(batch, self.task["prompt_len"], FEW_TOKENS)  # warms up
        found = []
        for _ in range(self.task["repeat"]):
            few = self._generate(batch, self.task["prompt_len"], FEW_TOKENS)
            more = self._generate(batch, self.task["prompt_len"], FEW_TOKENS + self.task["steps"])
            found.append((more[0] - few[0]) / (more[1] - few[1]) * 1000)
        return statistics.median(found)

    def first_token_ms(self, length: int) -> float:
        self._generate(1, length, 1)
        times = [self._generate(1, length, 1)[0] for _ in range(self.task["repeat"])]
        return statistics.median(times) * 1000

    def tokens_per_s(self, batch: int) -> list[float]:
        """Of each run: groups of requests, one after another."""
        length, num_tokens = self.task["prompt_len"], self.task["output_len"]
        sizes = self.task["groups"][str(batch)]
        self._generate(batch, length, min(WARM_TOKENS, num_tokens))
        found = []
        for _ in range(self.task["repeat"]):
            seconds = sum(self._generate(size, length, num_tokens)[0] for size in sizes)
            found.append(sum(sizes) * num_tokens / seconds)
        return found

    def _generate(self, batch: int, length: int, num_tokens: int) -> tuple[float, float]:
        """Return the seconds, and the steps per request: its tokens minus accepted drafts."""
        words = range(3, self.task["target"]["vocab_size"])
        prompts = [{"prompt_token_ids": self.source.choices(words, k=length)} for _ in range(batch)]
        params = self.params(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        before = self._num_accepted()
        started = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return seconds, num_tokens - (self._num_accepted() - before) / batch

    def _num_accepted(self) -> float:
        if not self.task["k"]:
            return 0.0
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == ACCEPTED)


def _write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def main() -> None:
    task = json.load(sys.stdin)
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        peer = Peer(task, Path(folder))
        result: dict[str, Any] = {"engine": f"vllm {peer.version}", "start_s": peer.start_s}
        if "groups" in task:
            result["tokens_per_s"] = {batch: peer.tokens_per_s(batch) for batch in task["batch"]}
        else:
            result["ms_per_step"] = {batch: peer.step_ms(batch) for batch in task["batch"]}
            first_tokens = {n: peer.first_token_ms(n) for n in task["first_token"]}
            result["first_token_ms"] = first_tokens
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
