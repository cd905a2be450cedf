"""Translates engine options as users write them, vLLM's names included, to stoop's own."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stoop.config.errors import ConfigError
from stoop.config.graph_names import (
    GRAPH_MODES,
    GRAPH_OPTIONS,
    Setting,
    graph_settings,
    mode_name,
    parse_sizes,
)
from stoop.config.schema import FP8, EngineOptions
from stoop.config.values import plain, shown, unknown_name
from stoop.config.vllm_names import ENGINE_ARGS, check_foreign

RENAMED = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
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
    if "graph_mode" in options and mode_name(options["graph_mode"]) in ("auto", *GRAPH_MODES):
        options["graph_mode"] = mode_name(options["graph_mode"])  # else refused as it was written
    _put_all(options, [*_renamed(given), *graph_settings(given)])
    for name, words in SYNONYMS.items():
        if name in options:
            options[name] = _synonym(options[name], words)
    for name in ("tokenizer", "device"):
        if name in options:
            options[name] = _as_text(options[name])
    return options


def _check_others(others: Mapping[str, Any]) -> None:
    own = {f.name for f in dataclasses.fields(EngineOptions)}
    others = {n: v for n, v in others.items() if n not in RENAMED and n not in GRAPH_OPTIONS}
    for name in others:
        if name not in ENGINE_ARGS:
            raise ConfigError(unknown_name("engine option", name, own))
    refusal = check_foreign(ENGINE_ARGS, others)
    if refusal is not None:
        raise ConfigError(refusal)


def _renamed(given: Mapping[str, Any]) -> Iterator[Setting]:
    for theirs, ours in RENAMED.items():
        if given.get(theirs) is not None:
            yield Setting(ours, plain(given[theirs]), theirs)


def _put_all(options: dict[str, Any], settings: Iterable[Setting]) -> None:
    """Set options under stoop's names; refuse two that say different things."""
    sources: dict[str, str] = {}
    for name, value, source in settings:
        if options.get(name) is None or (name, options[name]) == ("graph_mode", "auto"):
            options[name], sources[name] = value, source
        elif not _agree(name, options[name], value):
            other = sources.get(name, f"{name}={shown(options[name])}")
            raise ConfigError(f"{source} and {other} disagree: give one of them")


def _agree(name: str, one: Any, other: Any) -> bool:
    if name == "capture_sizes":
        return parse_sizes(one) == parse_sizes(other)
    return bool(one == other)


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
