"""User options and a checkpoint's own facts, checked and merged into one `Config`."""

import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from stoop.config.errors import ConfigError
from stoop.config.schema import (
    DTYPES,
    CacheConfig,
    Config,
    DeviceConfig,
    EngineOptions,
    GraphConfig,
    LoadConfig,
    ModelSpec,
    ScheduleConfig,
    SpecConfig,
)

ATTENTION_BACKENDS = ("reference", "hostplan", "triton", "flashinfer")
FLASHINFER_HEAD_SIZES = (64, 128, 256)
GRAPH_MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "step")
MAX_RUN_AHEAD = 8
MIN_KV_BLOCKS = 2  # the null block and one to use


def unknown_name(kind: str, name: str, known: list[str]) -> str:
    """One sentence for a name nobody knows, with the likeliest meaning or the whole list."""
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    return f"unknown {kind} {name!r}: {advice}"


def make_options(model: str, options: dict[str, Any]) -> EngineOptions:
    known = [f.name for f in dataclasses.fields(EngineOptions)]
    for name in options:
        if name not in known:
            raise ConfigError(unknown_name("engine option", name, known))
    return EngineOptions(model=model, **options)


def resolve(
    options: EngineOptions,
    model: ModelSpec,
    folder: str,
    device: str,
    spec: SpecConfig | None = None,
) -> Config:
    """`device` is the concrete one that the worker found for `options.device`."""
    if options.load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format={options.load_format!r}: use auto or dummy")
    dtype = _dtype(options.dtype, model)
    backend = _attention(options.attention_backend, device, dtype)
    schedule = _schedule(options, model, device, spec)
    schedule = dataclasses.replace(schedule, run_ahead=_run_ahead(options, device, backend))
    return Config(
        model=model,
        load=LoadConfig(folder, options.load_format == "dummy", options.seed),
        device=DeviceConfig(device, dtype),
        cache=_cache(options),
        schedule=schedule,
        attention_backend=backend,
        graph=_graph(options, device, max_tokens=schedule.max_num_batched_tokens),
        spec=spec,
    )


def _attention(asked: str, device: str, dtype: str) -> str:
    """By default our kernels where they run."""
    if asked == "auto":
        return "triton" if device.startswith("cuda") and dtype != "float64" else "reference"
    if asked not in ATTENTION_BACKENDS:
        known = " or ".join(("auto", *ATTENTION_BACKENDS))
        raise ConfigError(f"attention_backend={asked!r}: use {known}")
    return asked


def attention_backends(device: str, dtype: str, head_dim: int) -> list[str]:
    """Those that run a model on a device, of what is installed."""
    cuda = device.startswith("cuda")
    served = cuda and dtype in ("bfloat16", "float16") and head_dim in FLASHINFER_HEAD_SIZES
    runs = {
        "triton": cuda and dtype != "float64",
        "flashinfer": served and importlib.util.find_spec("flashinfer") is not None,
    }
    return [name for name in ATTENTION_BACKENDS if runs.get(name, True)]


def _dtype(asked: str, model: ModelSpec) -> str:
    if asked == "auto":
        return model.dtype
    if asked not in DTYPES:
        raise ConfigError(f"dtype={asked!r}: use auto, {', '.join(DTYPES)}")
    return asked


def _cache(options: EngineOptions) -> CacheConfig:
    size = _integer("block_size", options.block_size, least=1)
    if size & (size - 1):
        raise ConfigError(f"block_size={size}: use a power of two, such as 16")
    share = options.gpu_memory_utilization
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization={share!r}: use a number above 0, at most 1")
    num_blocks = options.num_kv_blocks
    if num_blocks is not None:
        _integer("num_kv_blocks", num_blocks, least=MIN_KV_BLOCKS)
    memory = options.kv_cache_memory
    return CacheConfig(
        block_size=size,
        num_blocks=num_blocks,
        gpu_memory_utilization=float(share),
        kv_cache_memory=None if memory is None else parse_bytes("kv_cache_memory", memory),
        enable_prefix_caching=_switch("enable_prefix_caching", options.enable_prefix_caching),
    )


def _run_ahead(options: EngineOptions, device: str, backend: str) -> int:
    asked = options.run_ahead
    if asked is not None and _integer("run_ahead", asked, least=0) > MAX_RUN_AHEAD:
        raise ConfigError(f"run_ahead={asked}: use at most {MAX_RUN_AHEAD}")
    if backend == "flashinfer":  # its plans need lengths that only a result tells
        if asked:
            raise ConfigError(
                f"run_ahead={asked}: attention_backend=flashinfer plans each step from the results "
                "of the one before; use run_ahead=0 or another backend"
            )
        return 0
    if asked is None:
        return 0 if device == "cpu" else 1
    return asked


def _graph(options: EngineOptions, device: str, max_tokens: int) -> GraphConfig:
    mode, sanitize = options.graph_mode, _switch("sanitize", options.sanitize)
    if mode == "auto":
        mode = "none" if device == "cpu" else "step"
    if mode not in GRAPH_MODES:
        raise ConfigError(f"graph_mode={mode!r}: use auto, {', '.join(GRAPH_MODES)}")
    if mode == "none" and (sanitize or options.capture_sizes is not None):
        raise ConfigError(
            "sanitize and capture_sizes are about graphs, and graph_mode is none: choose a mode"
        )
    if options.capture_sizes is None:
        return GraphConfig(mode, None, sanitize)
    sizes = _capture_sizes(options.capture_sizes)
    if not sizes or sizes[0] < 1 or sizes[-1] > max_tokens:
        raise ConfigError(
            f"capture_sizes={options.capture_sizes!r}: use numbers from 1 to "
            f"max_num_batched_tokens={max_tokens}, such as 1,2,4,8"
        )
    return GraphConfig(mode, sizes, sanitize)


def _capture_sizes(given: str | Sequence[int]) -> tuple[int, ...]:
    """In rising order; empty if there is something else than numbers among them."""
    parts = given.split(",") if isinstance(given, str) else given
    try:
        return tuple(sorted({int(part) for part in parts}))
    except (TypeError, ValueError):
        return ()


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: use True or False")
    return value


def _schedule(
    options: EngineOptions, model: ModelSpec, device: str, spec: SpecConfig | None
) -> ScheduleConfig:
    max_model_len = _given("max_model_len", options.max_model_len, model.max_position)
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len={max_model_len} is beyond the {model.max_position} positions that the "
            f"model was made for: use at most {model.max_position}"
        )
    default_seqs = 16 if device == "cpu" else 256
    max_num_seqs = _given("max_num_seqs", options.max_num_seqs, default_seqs)
    num_drafts = spec.num_tokens if spec else 0
    default_tokens = 2048 if device == "cpu" else 8192
    default_tokens = max(default_tokens, max_num_seqs * (num_drafts + 1))
    if not options.enable_chunked_prefill:
        default_tokens = max(default_tokens, max_model_len)
    max_tokens = _given("max_num_batched_tokens", options.max_num_batched_tokens, default_tokens)
    if max_tokens < max_num_seqs * (num_drafts + 1):
        drafts = f" times {num_drafts + 1} tokens of a step" if spec else ""
        raise ConfigError(
            f"max_num_batched_tokens={max_tokens} is below max_num_seqs={max_num_seqs}{drafts}, so "
            "that not every request could decode in a step: raise the first or lower the second"
        )
    if not options.enable_chunked_prefill and max_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={max_tokens} cannot hold a prompt of max_model_len="
            f"{max_model_len} with chunked prefill off: raise it or leave chunked prefill on"
        )
    chunked = _switch("enable_chunked_prefill", options.enable_chunked_prefill)
    return ScheduleConfig(
        max_model_len,
        max_num_seqs,
        max_tokens,
        chunked,
        num_drafts=num_drafts,
        drafter_has_kv=spec is not None and spec.head is not None,
    )


def _given(name: str, value: int | None, default: int) -> int:
    return default if value is None else _integer(name, value, least=1)


def _integer(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: use a whole number of at least {least}")
    return value


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes of `2147483648`, `2GiB`, `500MB` or `2G`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise ConfigError(f"{name}={value!r}: use a number of bytes, such as 2147483648 or 2GiB")
    return int(float(match[1]) * unit)
