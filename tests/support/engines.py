"""Small engines."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stoop import LLM, SamplingParams

MakeEngine = Callable[..., LLM]

SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "kv_cache_memory": "16MiB",  # unless num_kv_blocks says how much; the default is gigabytes
}


def make_llm(model: str | Path, **options: Any) -> LLM:
    """A small engine in float64 on the CPU, without a tokenizer where the model's folder has none.

    capture_sizes: left out without graphs, so that settings can name them for every mode
    """
    settings = SMALL | options
    settings.setdefault("skip_tokenizer_init", not Path(model, "tokenizer.json").exists())
    if settings.get("graph_mode", "none" if settings["device"] == "cpu" else "auto") == "none":
        settings.pop("capture_sizes", None)
    return LLM(str(model), **settings)


def generate_ids(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """The token ids of each prompt's first answer."""
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
