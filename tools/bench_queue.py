"""The time of a step with few and with many queued prompts, and the time to abort them all.

    python tools/bench_queue.py --queued 16,20000,100000

Uses a toy model, so that host time dominates. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from stoop import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
TIMED_STEPS = 200


def make_llm(folder: Path) -> LLM:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, device="cpu")


def measure(llm: LLM, num_queued: int) -> dict[str, Any]:
    """Return milliseconds per step, and seconds to queue, answer and abort the prompts."""
    prompts = [[i % 60 + 1, i // 60 % 60 + 1] for i in range(num_queued)]
    steps, real_step = [], llm.engine.step

    def timed_step() -> Any:
        started = time.perf_counter()
        outputs = real_step()
        steps.append(time.perf_counter() - started)
        if len(steps) == TIMED_STEPS and leave:
            raise KeyboardInterrupt
        return outputs

    llm.engine.step = timed_step  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=4)
    leave = False
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    answered = time.perf_counter() - started
    between = (answered - sum(steps)) / len(steps)
    middle = statistics.median(steps)
    steps.clear()
    leave = True
    left = 0.0
    started = time.perf_counter()
    try:
        llm.generate(prompts * (1 + 16 * TIMED_STEPS // num_queued), params, use_tqdm=False)
    except KeyboardInterrupt:
        left = time.perf_counter() - started - sum(steps)
    del llm.engine.step
    return {
        "queued": num_queued,
        "ms_a_step": round(1e3 * middle, 3),
        "ms_between_steps": round(1e3 * between, 3),
        "seconds": round(answered, 2),
        "seconds_to_queue_and_leave": round(left, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queued", default="16,20000,100000", help="numbers of prompts")
    sizes = [int(part) for part in parser.parse_args().queued.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        llm = make_llm(Path(folder))
        measure(llm, 16)  # warms up
        rows = []
        for size in sizes:
            rows.append(measure(llm, size))
            print(rows[-1], flush=True)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
