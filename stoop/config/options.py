"""Translates engine options as users write them, vLLM's names included, to stoop's own."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from stoop.config.errors import ConfigError
from stoop.config.schema import FP8, EngineOptions
from stoop.config.values import plain, shown, unknown_name
from stoop.config.vllm_names import ENGINE_ARGS, check_foreign

RENAMED = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
    "cudagraph_capture_sizes": "capture_sizes",
    "cuda_graph_sizes": "capture_sizes",
}
# For these, None means the default, as in vLLM.
NONE_IS_DEFAULT = (
    "seed",
    "block_size",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "attention_backend",
    "kv_cache_dtype",
)
_DTYPE_WORDS: dict[Any, str] = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "fp64": "float64",
}
# Synonyms of values; those in lower case match any case.
SYNONYMS: dict[str, dict[Any, str]] = {
    **dict.fromkeys(("dtype", "weight_dtype"), _DTYPE_WORDS),
    "kv_cache_dtype": {**_DTYPE_WORDS, "fp8": FP8, "fp8_e4m3": FP8, FP8: FP8},
    "load_format": {"safetensors": "auto", "hf": "auto", "gguf": "auto"},
    "attention_backend": {"FLASHINFER": "flashinfer", "TRITON_ATTN": "triton"},
}


def translate(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `EngineOptions`; refuses what stoop does not support."""
    known = {f.name for f in dataclasses.fields(EngineOptions)}
    _check_others({name: given[name] for name in given if name not in known})
    options = {name: plain(given[name]) for name in given if name in known}
    for name in NONE_IS_DEFAULT:
        if name in options and options[name] is None:
            del options[name]
    for theirs, ours in RENAMED.items():
        if given.get(theirs) is not None:
            _put(options, ours, plain(given[theirs]), theirs)
    if _enforces_eager(given):
        if options.get("graph_mode") == "auto":
            del options["graph_mode"]
        _put(options, "graph_mode", "none", "enforce_eager")
    for name, words in SYNONYMS.items():
        if name in options:
            options[name] = _synonym(options[name], words)
    for name in ("tokenizer", "device"):
        if name in options:
            options[name] = _as_text(options[name])
    return options


def _check_others(others: Mapping[str, Any]) -> None:
    own = {f.name for f in dataclasses.fields(EngineOptions)}
    others = {n: v for n, v in others.items() if n not in RENAMED and n != "enforce_eager"}
    for name in others:
        if name not in ENGINE_ARGS:
            raise ConfigError(unknown_name("engine option", name, own))
    refusal = check_foreign(ENGINE_ARGS, others)
    if refusal is not None:
        raise ConfigError(refusal)


def _put(options: dict[str, Any], name: str, value: Any, source: str) -> None:
    """Set an option under stoop's name; refuse it if that name was given another value."""
    if options.setdefault(name, value) != value:
        raise ConfigError(f"{source} and {name}={shown(options[name])} disagree: give one of them")


def _enforces_eager(given: Mapping[str, Any]) -> bool:
    value = plain(given.get("enforce_eager"))
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"enforce_eager={shown(value)}: use True or False")
    return bool(value)


def _synonym(value: Any, words: Mapping[Any, str]) -> Any:
    if type(value).__module__ == "torch":  # a torch.dtype
        value = str(value).removeprefix("torch.")
    if not isinstance(value, str):
        return value
    return words.get(value, words.get(value.lower(), value))


def _as_text(value: Any) -> Any:
    """Turn paths and torch devices into text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value) if type(value).__module__ == "torch" else value


class EngineArgs(EngineOptions):
    """`EngineOptions` that also accept vLLM's names, as in `LLM(**asdict(EngineArgs(...)))`."""

    def __init__(self, model: str = EngineOptions.model, **options: Any) -> None:
        super().__init__(model=model, **translate(options))
