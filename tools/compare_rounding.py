"""What rounding does to a model's log-probabilities: packed weights with activations of 16 and 8
bits, and bfloat16, each against dequantised weights in float32.

    python tools/compare_rounding.py --questions gsm8k.jsonl [--limit 40] [--model smollm2-135m]

The figures are of all tokens of the questions but the first ones: root mean square, and the most.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from stoop import LLM, SamplingParams
from stoop.bench.questions import read_questions

EXACT = {"weights": "dense", "dtype": "float32"}
OTHERS: dict[str, dict[str, Any]] = {
    "packed, 16-bit activations": {"weights": "packed"},
    "packed, 8-bit activations": {"weights": "packed", "activation_bits": 8},
    "bfloat16": {"weights": "dense", "dtype": "bfloat16"},
}
SCORES = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def score(model: str, texts: list[str], options: dict[str, Any]) -> list[float]:
    """The log-probability of each token, given those before it."""
    llm = LLM(model, device="cpu", graph_mode="none", speculative_config="none", **options)
    found = []
    for output in llm.generate(texts, SCORES, use_tqdm=False):
        assert output.prompt_logprobs is not None and output.prompt_token_ids is not None
        tokens = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found += [entry[token].logprob for token, entry in tokens if entry is not None]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--limit", type=int, default=40, help="questions to use")
    parser.add_argument("--model", default="smollm2-135m", help="a model in a GGUF file")
    asked = parser.parse_args()
    (questions,) = read_questions([asked.questions], asked.limit).values()
    texts = [each[-1]["content"] for each in questions]
    exact = score(asked.model, texts, EXACT)
    print(f"{len(exact)} tokens, against float32")
    for name, options in OTHERS.items():
        errors = [a - b for a, b in zip(score(asked.model, texts, options), exact, strict=True)]
        rms = math.sqrt(sum(error**2 for error in errors) / len(errors))
        print(f"{name}: {rms:.4f} (rms), {max(map(abs, errors)):.3f} (most)")


if __name__ == "__main__":
    main()
