"""Engine options as users of vLLM write them, and values of every type."""

import dataclasses
import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoop import EngineArgs
from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options, resolve
from stoop.config.schema import Config, EngineOptions
from stoop.config.vllm_names import CALL_ARGS, ENGINE_ARGS, PROMPT_KEYS, SAMPLING_ARGS, Foreign
from support.specs import tiny_spec


def resolved(device: str = "cpu", **options: Any) -> Config:
    return resolve(make_options("x", options), tiny_spec(), "folder", device)


HARMLESS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": np.int64(1)},
    {"trust_remote_code": True},
    {"swap_space": 4, "cpu_offload_gb": 0, "max_seq_len_to_capture": 8192},
    {"disable_log_stats": True, "disable_custom_all_reduce": False},
    {"tokenizer_mode": "auto", "kv_cache_dtype": "auto", "quantization": None},
    {"enable_lora": False, "max_lora_rank": 16, "limit_mm_per_prompt": {"image": 0}},
    {"task": "generate", "runner": "auto", "convert": "auto"},
    {"hf_overrides": None, "rope_scaling": {}, "compilation_config": 3, "model_impl": "auto"},
    {"scheduling_policy": "priority", "async_scheduling": False, "max_logprobs": 20},
    {"enforce_eager": False, "hf_token": None, "generation_config": "auto"},
    {"seed": None, "block_size": None, "enable_prefix_caching": None},
    {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": None, "max_model_len": None},
]


@pytest.mark.parametrize("options", HARMLESS, ids=str)
def test_what_means_nothing_here_is_ignored(options: dict[str, Any]) -> None:
    assert make_options("x", options) == make_options("x", {})


def test_what_is_ignored_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_options("x", {"tensor_parallel_size": 1, "trust_remote_code": True, "quantization": None})
    (message,) = caplog.messages
    assert "tensor_parallel_size=1, trust_remote_code=True" in message
    assert "quantization" not in message
    caplog.clear()
    make_options("x", {"max_num_seqs": 4, "quantization": None})
    assert not caplog.messages


REFUSED: list[tuple[str, Any, str]] = [
    ("tensor_parallel_size", 2, "one device"),
    ("tensor_parallel_size", True, "one device"),
    ("distributed_executor_backend", "ray", "one device"),
    ("enable_lora", True, "no LoRA"),
    ("quantization", "awq", "GGUF"),
    ("kv_cache_dtype", "fp8_e5m2", "dtype of the model"),
    ("cpu_offload_gb", 4, "smaller model"),
    ("task", "embed", "no pooling"),
    ("runner", "pooling", "no pooling"),
    ("tokenizer_mode", "slow", "tokenizer.json"),
    ("logits_processors", [len], "logit_bias"),
    ("hf_overrides", {"rope_theta": 1.0}, "config.json"),
    ("generation_config", "vllm", r"SamplingParams\(\)"),
    ("compilation_config", {"mode": 3}, "graph_mode"),
    ("download_dir", "/models", "STOOP_CACHE"),
    ("hf_token", "secret", "HF_TOKEN"),
    ("speculative_model", "x", "speculative_config"),
    ("enable_sleep_mode", True, "make a new one"),
    ("temperature", 0.5, "SamplingParams"),
]


@pytest.mark.parametrize("name", ["weight_dtype", "kv_cache_dtype"])
def test_weights_and_cache_have_a_dtype_of_their_own(name: str) -> None:
    field = {"weight_dtype": "weight_dtype", "kv_cache_dtype": "kv_dtype"}[name]
    for dtype in ("float32", "bfloat16"):
        assert getattr(resolved(dtype=dtype).device, field) == dtype
    device = resolved(dtype="float32", **{name: "bf16"}).device
    assert (device.dtype, getattr(device, field)) == ("float32", "bfloat16")
    assert sorted((device.weight_dtype, device.kv_dtype)) == ["bfloat16", "float32"]
    assert getattr(resolved(dtype="float32", **{name: torch.float16}).device, field) == "float16"
    with pytest.raises(ConfigError, match=rf"{name}='int4': use auto, float64, float32, bfloat"):
        make_options("x", {name: "int4"})
    refused = {"weight_dtype": ("fp8", "fp8_e4m3", "fp8_e5m2"), "kv_cache_dtype": ("fp8_e5m2",)}
    for word in refused[name]:
        with pytest.raises(ConfigError, match=rf"{name}='{word}' is not supported: .* 8 bits"):
            make_options("x", {name: word})


@pytest.mark.parametrize(
    "given", ["fp8", "FP8", "fp8_e4m3", "Fp8_E4M3", "float8_e4m3fn", torch.float8_e4m3fn]
)
def test_the_cache_may_be_in_fp8(given: Any) -> None:
    device = resolved(dtype="bfloat16", kv_cache_dtype=given).device
    assert (device.dtype, device.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert device.weight_dtype == "bfloat16"
    for name in ("dtype", "weight_dtype"):
        with pytest.raises(ConfigError, match=f"^{name}="):
            make_options("x", {name: given})


@pytest.mark.parametrize("given", ["fp8_e5m2", "FP8_INC", "fp8_ds_mla", "nvfp4", torch.float8_e5m2])
def test_other_formats_of_few_bits_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype=.* is not supported: .*use fp8"):
        make_options("x", {"kv_cache_dtype": given})
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8': use auto, .*float16 or fp8$"):
        make_options("x", {"kv_cache_dtype": "int8"})


@pytest.mark.parametrize(("name", "value", "advice"), REFUSED)
def test_what_would_matter_is_refused_by_name(name: str, value: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.* is not supported: .*{advice}") as refusal:
        make_options("x", {name: value})
    assert "did you mean" not in str(refusal.value) and "known are" not in str(refusal.value)


def test_an_unknown_option_gets_the_likeliest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        make_options("x", {"max_num_seq": 1})
    with pytest.raises(ConfigError, match=r"unknown engine option 'zzz': known are"):
        make_options("x", {"zzz": 1})


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("half", "float16"),
        ("float16", "float16"),
        ("bf16", "bfloat16"),
        ("float", "float32"),
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "float32"),
        (torch.float64, "float64"),
        ("auto", tiny_spec().dtype),
    ],
)
def test_dtypes_have_other_names(given: Any, dtype: str) -> None:
    assert resolved(dtype=given).device.dtype == dtype


@pytest.mark.parametrize("given", [torch.int8, torch.float8_e4m3fn, "int4", 16, float, None])
def test_other_dtypes_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"dtype=.*use auto, float64, float32, bfloat16 or float"):
        make_options("x", {"dtype": given})


def test_enforce_eager_means_no_graphs() -> None:
    assert resolved("cuda:0").graph.mode == "step"
    assert resolved("cuda:0", enforce_eager=True).graph.mode == "none"
    assert resolved("cuda:0", enforce_eager=True, graph_mode="auto").graph.mode == "none"
    assert resolved("cuda:0", enforce_eager=True, graph_mode="none").graph.mode == "none"
    assert resolved("cuda:0", enforce_eager=False, graph_mode="full").graph.mode == "full"
    with pytest.raises(ConfigError, match="enforce_eager and graph_mode='full' disagree"):
        resolved("cuda:0", enforce_eager=True, graph_mode="full")
    with pytest.raises(ConfigError, match="enforce_eager='yes': use True or False"):
        resolved("cuda:0", enforce_eager="yes")


def test_other_names_of_options_are_taken() -> None:
    config = resolved(
        "cuda:0",
        kv_cache_memory_bytes=2**30,
        num_gpu_blocks_override=np.int32(99),
        cudagraph_capture_sizes=np.array([4, 1, 2]),
        attention_backend="TRITON_ATTN",
        load_format="safetensors",
        max_num_seqs=np.int64(4),
        gpu_memory_utilization=np.float32(0.5),
    )
    assert (config.cache.kv_cache_memory, config.cache.num_blocks) == (2**30, 99)
    assert config.graph.capture_sizes == (1, 2, 4)
    assert (config.attention_backend, config.schedule.max_num_seqs) == ("triton", 4)
    assert config.cache.gpu_memory_utilization == 0.5
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes and kv_cache_memory=5 disagree"):
        make_options("x", {"kv_cache_memory_bytes": 6, "kv_cache_memory": 5})


def test_paths_and_devices_may_be_objects() -> None:
    options = make_options(
        Path("folder"), {"tokenizer": Path("other"), "device": torch.device("cuda:1")}
    )
    assert (options.model, options.tokenizer, options.device) == ("folder", "other", "cuda:1")


def test_engine_args_take_vllms_names() -> None:
    args = EngineArgs(model="m", tensor_parallel_size=1, enforce_eager=True, dtype="half")
    given = dataclasses.asdict(args)
    assert make_options(given.pop("model"), given) == make_options(
        "m", {"graph_mode": "none", "dtype": "float16"}
    )
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 is not supported"):
        EngineArgs(model="m", tensor_parallel_size=4)


ANYTHING: list[Any] = [
    None, True, 0, 1, -1, 3, 2**40, 2**70, 10**5000, 0.5, float("nan"), float("inf"), 1j, "", "x",
    "\0", "²", "1,²", "9" * 500, "cuda:²", "cuda:" + "9" * 50, "auto ", "{", "[1]", b"x", [], [1],
    ["x"], [None], [1.5], [float("inf")], {}, {1: 1}, {"method": []}, {"method": "ngram", 1: 2},
    {"model": 5}, set(), {1}, (), object(), len, int, range(3), np.zeros(3), np.int64(1),
    np.float32, np.zeros((2, 2)), np.array("x"), torch.zeros(2), torch.tensor(1),
    torch.zeros(2, device="meta"), torch.float32, torch.device("cpu"), Fraction(1, 2), iter([1]),
    Path("x"),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(EngineOptions)])
def test_any_value_is_taken_or_refused_with_a_sentence(name: str, device: str) -> None:
    from stoop.config.speculation import asks_for_auto, parse_speculation

    for value in ANYTHING:
        try:
            model = value if name == "model" else "x"
            options = make_options(model, {} if name == "model" else {name: value})
            if not asks_for_auto(options.speculative_config):
                parse_speculation(options.speculative_config)
            resolve(options, tiny_spec(), "folder", device)
        except ConfigError as error:
            refusal = str(error)
        else:
            continue
        assert name in refusal and "\n" not in refusal and len(refusal) < 400


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "block_size"])
def test_a_number_of_too_many_digits_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=1073741824: use at most"):
        resolved(**{name: 2**30})


@pytest.mark.parametrize("table", [ENGINE_ARGS, SAMPLING_ARGS, CALL_ARGS, PROMPT_KEYS])
def test_every_refusal_says_what_to_do(table: dict[str, Foreign]) -> None:
    for name, foreign in table.items():
        assert foreign.always or (foreign.advice and foreign.is_harmless(None)), name
        assert foreign.always or not foreign.is_harmless(object()), name
        assert not foreign.advice.endswith("."), name


def test_no_option_of_stoop_is_taken_for_a_foreign_one() -> None:
    own = {f.name for f in dataclasses.fields(EngineOptions)}
    assert not own & ENGINE_ARGS.keys()
