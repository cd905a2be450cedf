"""Checks user options and merges them with a checkpoint's spec into one `Config`."""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stoop.config.backends import (
    AUTO,
    BackendTraits,
    backend_names,
    backend_traits,
    choose_backend,
    needs_zeroed_blocks,
)
from stoop.config.errors import ConfigError
from stoop.config.graph_names import GRAPH_MODES, VllmLimit, VllmSizes, parse_sizes
from stoop.config.options import translate
from stoop.config.schema import (
    CAPTURE_SIZE,
    DTYPES,
    FP8,
    GPU_CAPTURE_SIZE,
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
from stoop.config.values import is_number, is_whole, shown

log = logging.getLogger(__name__)

MAX_RUN_AHEAD = 8
MAX_THREADS = 1024
_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, FP8: 8}
_FEW_BITS = re.compile(r"(nv|mx)?(fp|float)[48]", re.IGNORECASE)
MIN_KV_BLOCKS = 2  # the null block and one to use
# More than anything that runs. Without a limit, a typo of a few digits ends in an allocation error.
MAX_COUNT = 2**31 - 1
MAX_BLOCK_SIZE = 2**16
MAX_NUM_SEQS = 2**16
MAX_BATCHED_TOKENS = 2**22


def make_options(model: Any, options: Mapping[str, Any]) -> EngineOptions:
    """A user's options in stoop's form, with every check that needs no model."""
    made = EngineOptions(model=_path("model", model), **translate(options))
    _check_alone(made)
    return made


def _check_alone(options: EngineOptions) -> None:
    """Check each option by itself, except numbers."""
    _choice("load_format", options.load_format, ("auto", "dummy"))
    _choice("weights", options.weights, ("auto", "packed", "dense"))
    if not is_whole(options.activation_bits) or options.activation_bits not in (8, 16):
        raise ConfigError(f"activation_bits={shown(options.activation_bits)}: use 8 or 16")
    for name in ("dtype", "weight_dtype", "kv_cache_dtype"):
        _check_dtype(name, getattr(options, name))
    _choice("attention_backend", options.attention_backend, (AUTO, *backend_names()))
    _choice("graph_mode", options.graph_mode, ("auto", *GRAPH_MODES))
    for name in (
        "skip_tokenizer_init",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "sanitize",
        "capture_structured",
    ):
        _switch(name, getattr(options, name))
    device = options.device
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", device):
        raise ConfigError(f"device={shown(device)}: use auto, cpu, cuda or cuda:N")
    if not is_whole(options.seed) or not -(2**63) <= options.seed < 2**63:
        raise ConfigError(f"seed={shown(options.seed)}: use a whole number of at most 64 bits")
    if options.tokenizer is not None:
        _path("tokenizer", options.tokenizer)
    if not isinstance(options.revision, str | None):
        raise ConfigError(f"revision={shown(options.revision)}: use text")


def _choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name}={shown(value)}: use {', '.join(choices[:-1])} or {choices[-1]}")


def _check_dtype(name: str, value: object) -> None:
    if name == "kv_cache_dtype":
        if value == FP8:
            return
        if isinstance(value, str) and _FEW_BITS.match(value):
            raise ConfigError(
                f"{name}={shown(value)} is not supported: e4m3 is stoop's only 8-bit format; use "
                "fp8 or auto (the model's dtype)"
            )
        _choice(name, value, ("auto", *DTYPES, "fp8"))
        return
    if isinstance(value, str) and _FEW_BITS.match(value):
        raise ConfigError(
            f"{name}={shown(value)} is not supported: stoop has no weights of 8 bits or fewer; use "
            "auto (the model's dtype) or bfloat16, and for the KV cache use kv_cache_dtype=fp8"
        )
    _choice(name, value, ("auto", *DTYPES))


def _path(name: str, value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or "\0" in text:
        raise ConfigError(f"{name}={shown(value)}: use text or a path")
    return text


def resolve(
    options: EngineOptions,
    model: ModelSpec,
    folder: str,
    device: str,
    spec: SpecConfig | None = None,
    packed: bool = False,
) -> Config:
    """Make the `Config`.

    device: the concrete one that the worker chose for `options.device`; packed: the weights in
    `folder` stay quantised
    """
    _check_alone(options)
    types = _device(options, model, device)
    types = dataclasses.replace(
        types, packed=packed, activation_bits=options.activation_bits if packed else 16
    )
    backend = choose_backend(options.attention_backend, device, types.dtype)
    if packed and options.attention_backend == AUTO:
        backend = _packed_backend(backend, model, types)
    schedule = _schedule(options, model, device, spec)
    schedule = dataclasses.replace(schedule, run_ahead=_run_ahead(options, device, backend))
    return Config(
        model=model,
        load=LoadConfig(
            folder,
            options.load_format == "dummy",
            options.seed,
            None if options.skip_tokenizer_init else (options.tokenizer or folder),
        ),
        device=types,
        cache=_cache(options, zero_new_blocks=needs_zeroed_blocks(backend)),
        schedule=schedule,
        attention_backend=backend.name,
        graph=_graph(options, device, max_tokens=schedule.max_num_batched_tokens),
        spec=spec,
    )


def _packed_backend(default: BackendTraits, model: ModelSpec, types: DeviceConfig) -> BackendTraits:
    """The backend whose kernels run together with packed products, if it serves the model."""
    native = backend_traits("native")
    sizes, head_dim = native.head_sizes or (), getattr(model, "head_dim", None)
    serves = head_dim in sizes and native.reads(types.kv_dtype, types.dtype)
    return native if serves else default


def _device(options: EngineOptions, model: ModelSpec, device: str) -> DeviceConfig:
    """Weights and KV cache have the dtype of computation unless the options say otherwise."""
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    weight_dtype, kv_dtype = (
        dtype if asked == "auto" else asked
        for asked in (options.weight_dtype, options.kv_cache_dtype)
    )
    if _BITS[kv_dtype] > _BITS[dtype]:
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype} is wider than dtype={dtype}: use auto or a narrower one"
        )
    threads = options.num_threads
    if threads is not None:
        _integer("num_threads", threads, least=1, most=MAX_THREADS)
        if device != "cpu":
            raise ConfigError(f"num_threads={threads} is for CPUs, and the device is {device}")
    return DeviceConfig(device, dtype, weight_dtype, kv_dtype, num_threads=threads)


def _cache(options: EngineOptions, zero_new_blocks: bool) -> CacheConfig:
    size = _integer("block_size", options.block_size, least=1, most=MAX_BLOCK_SIZE)
    if size & (size - 1):
        raise ConfigError(f"block_size={size}: use a power of two, such as 16")
    share = options.gpu_memory_utilization
    if not is_number(share) or not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization={shown(share)}: use a number above 0, at most 1")
    num_blocks = options.num_kv_blocks
    if num_blocks is not None:
        _integer("num_kv_blocks", num_blocks, least=MIN_KV_BLOCKS)
    memory, states = options.kv_cache_memory, options.state_cache_memory
    return CacheConfig(
        block_size=size,
        num_blocks=num_blocks,
        gpu_memory_utilization=float(share),
        kv_cache_memory=None if memory is None else parse_bytes("kv_cache_memory", memory),
        state_cache_memory=None
        if states is None
        else parse_bytes("state_cache_memory", states, or_zero=True),
        enable_prefix_caching=options.enable_prefix_caching,
        zero_new_blocks=zero_new_blocks,
    )


def _run_ahead(options: EngineOptions, device: str, backend: BackendTraits) -> int:
    asked = options.run_ahead
    if asked is not None and _integer("run_ahead", asked, least=0) > MAX_RUN_AHEAD:
        raise ConfigError(f"run_ahead={asked}: use at most {MAX_RUN_AHEAD}")
    if backend.exact_lengths:
        if asked:
            raise ConfigError(
                f"run_ahead={asked}: attention_backend={backend.name} plans each step from the "
                "results of the one before; use run_ahead=0 or another backend"
            )
        return 0
    if asked is None:
        return 0 if device == "cpu" else 1
    return asked


def _graph(options: EngineOptions, device: str, max_tokens: int) -> GraphConfig:
    mode, sanitize = options.graph_mode, options.sanitize
    if mode == "auto":
        mode = default_graph_mode(device)
    if mode == "none":
        options = _without_graphs(options)
    usual = CAPTURE_SIZE if device == "cpu" else GPU_CAPTURE_SIZE
    largest = _given("max_capture_size", options.max_capture_size, usual)
    if options.capture_sizes is None:
        more = device != "cpu" and options.max_capture_size is None
        return GraphConfig(mode, None, sanitize, largest, more, options.capture_structured)
    sizes = parse_sizes(options.capture_sizes)
    if not sizes or sizes[0] < 1 or sizes[-1] > max_tokens:
        raise ConfigError(
            f"capture_sizes={shown(options.capture_sizes)}: use numbers from 1 to "
            f"max_num_batched_tokens={max_tokens}, such as 1,2,4,8"
        )
    if options.max_capture_size is not None and sizes[-1] > largest:
        raise ConfigError(
            f"max_capture_size={largest} and capture_sizes={shown(options.capture_sizes)} "
            "disagree: give one of them"
        )
    return GraphConfig(mode, sizes, sanitize, capture_structured=options.capture_structured)


def _without_graphs(options: EngineOptions) -> EngineOptions:
    """Drop sizes under vLLM's names; refuse other options of graphs."""
    ignored: dict[str, Any] = dict.fromkeys(_vllm_sizes(options))
    options = dataclasses.replace(options, **ignored)
    given = ["sanitize"] if options.sanitize else []
    given += ["capture_sizes"] if options.capture_sizes is not None else []
    if given:
        raise ConfigError(
            f"{' and '.join(given)} {'applies' if given == ['sanitize'] else 'apply'} to graphs, "
            "and graph_mode is none: choose a mode"
        )
    return options


def _vllm_sizes(options: EngineOptions) -> dict[str, Any]:
    """The sizes of graphs that came by vLLM's names."""
    sizes = {name: getattr(options, name) for name in ("capture_sizes", "max_capture_size")}
    return {name: each for name, each in sizes.items() if isinstance(each, VllmSizes | VllmLimit)}


def log_ignored(options: EngineOptions, config: Config) -> None:
    """Log the options that this configuration does not use."""
    ignored = _vllm_sizes(options) if config.graph.mode == "none" else {}
    if ignored:
        listed = ", ".join(f"{name}={shown(value)}" for name, value in ignored.items())
        log.info("ignored, since there are no graphs: %s", listed)


def default_graph_mode(device: str) -> str:
    """What graph_mode="auto" means."""
    return "none" if device == "cpu" else "step"


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: use True or False")
    return value


def _schedule(
    options: EngineOptions, model: ModelSpec, device: str, spec: SpecConfig | None
) -> ScheduleConfig:
    max_model_len = _given("max_model_len", options.max_model_len, model.max_position)
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len={max_model_len} is above the {model.max_position} positions that the "
            f"model was made for: use at most {model.max_position}"
        )
    default_seqs = 16 if device == "cpu" else 256
    max_num_seqs = _given("max_num_seqs", options.max_num_seqs, default_seqs, MAX_NUM_SEQS)
    num_drafts = spec.num_drafts if spec else 0
    default_tokens = 2048 if device == "cpu" else 8192
    default_tokens = max(default_tokens, max_num_seqs * (num_drafts + 1))
    if not options.enable_chunked_prefill:
        default_tokens = max(default_tokens, max_model_len)
    max_tokens = _given(
        "max_num_batched_tokens",
        options.max_num_batched_tokens,
        default_tokens,
        MAX_BATCHED_TOKENS,
    )
    if max_tokens < max_num_seqs * (num_drafts + 1):
        drafts = f" times {num_drafts + 1} tokens per step" if spec else ""
        raise ConfigError(
            f"max_num_batched_tokens={max_tokens} is below max_num_seqs={max_num_seqs}{drafts}, so "
            "not every request could decode in one step: raise the first or lower the second"
        )
    if not options.enable_chunked_prefill and max_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={max_tokens} cannot hold a prompt of max_model_len="
            f"{max_model_len} with chunked prefill off: raise it or leave chunked prefill on"
        )
    return ScheduleConfig(
        max_model_len,
        max_num_seqs,
        max_tokens,
        options.enable_chunked_prefill,
        num_drafts=num_drafts,
        adaptive=spec is not None and spec.adaptive,
        drafter_has_kv=spec is not None and spec.head is not None,
        drafter_max_len=spec.head.max_position if spec and spec.head else max_model_len,
    )


def _given(name: str, value: int | None, default: int, most: int = MAX_COUNT) -> int:
    return default if value is None else _integer(name, value, least=1, most=most)


def _integer(name: str, value: Any, least: int, most: int = MAX_COUNT) -> int:
    if not is_whole(value) or value < least:
        raise ConfigError(f"{name}={shown(value)}: use a whole number of at least {least}")
    if value > most:
        raise ConfigError(f"{name}={shown(value)}: use at most {most}")
    return int(value)


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}


def parse_bytes(name: str, value: int | str, or_zero: bool = False) -> int:
    """Parse a size such as `2147483648`, `2GiB`, `500MB` or `2G`."""
    text = value if isinstance(value, str) else shown(value)
    match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None or not (float(match[1]) > 0 or or_zero):
        advice = "use a number of bytes, such as 2147483648 or 2GiB"
        raise ConfigError(f"{name}={shown(value)}: {advice}{', or 0' if or_zero else ''}")
    return int(float(match[1]) * unit)
