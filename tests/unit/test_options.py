"""Engine options as users of vLLM write them, and values of every type."""

import dataclasses
import enum
import json
import logging
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stoop import EngineArgs
from stoop.config.errors import ConfigError
from stoop.config.graph_names import GRAPH_OPTIONS, KEYS
from stoop.config.resolve import log_ignored, make_options, resolve
from stoop.config.schema import Config, EngineOptions
from stoop.config.vllm_names import (
    CALL_ARGS,
    COMPILATION_ARGS,
    ENGINE_ARGS,
    PROMPT_KEYS,
    SAMPLING_ARGS,
    Foreign,
)
from stoop.graph.descriptor import GraphMode
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
    {"compilation_config": {"mode": 3, "level": 3, "backend": "inductor", "custom_ops": ["none"]}},
    {"compilation_config": {"use_inductor": False, "splitting_ops": [], "pass_config": {"x": 1}}},
    {"compilation_config": '{"cudagraph_num_of_warmups": 1, "cudagraph_mode": null}'},
    {"compilation_config": "2", "optimization_level": 3, "cudagraph_mode": None},
    {"compilation_config": {"use_cudagraph": True, "full_cuda_graph": False}},
    {"compilation_config": {}, "cuda_graph_sizes": None, "max_cudagraph_capture_size": None},
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
    ("kv_cache_dtype", "fp8_e5m2", "the model's dtype"),
    ("cpu_offload_gb", 4, "smaller model"),
    ("task", "embed", "no pooling"),
    ("runner", "pooling", "no pooling"),
    ("tokenizer_mode", "slow", "tokenizer.json"),
    ("logits_processors", [len], "logit_bias"),
    ("hf_overrides", {"rope_theta": 1.0}, "config.json"),
    ("generation_config", "vllm", r"SamplingParams\(\)"),
    ("compilation_config", 7, "graph_mode"),
    ("compilation_config", [1], "graph_mode"),
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
        with pytest.raises(ConfigError, match=rf"{name}='{word}' is not supported: .* 8[ -]bit"):
            make_options("x", {name: word})


@pytest.mark.parametrize(
    "given", ["fp8", "FP8", "fp8_e4m3", "Fp8_E4M3", "float8_e4m3fn", torch.float8_e4m3fn]
)
def test_the_cache_may_be_in_fp8(given: Any) -> None:
    device = resolved(dtype="bfloat16", kv_cache_dtype=given).device
    assert (device.dtype, device.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert device.weight_dtype == "bfloat16"
    for name in ("dtype", "weight_dtype"):
        with pytest.raises(ConfigError, match=f"^{name}=.*for the KV cache use kv_cache_dtype=fp8"):
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


@pytest.mark.parametrize("given", [torch.int8, torch.uint8, "int4", 16, float, None])
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


@pytest.mark.parametrize(
    "table", [ENGINE_ARGS, COMPILATION_ARGS, SAMPLING_ARGS, CALL_ARGS, PROMPT_KEYS]
)
def test_every_refusal_says_what_to_do(table: dict[str, Foreign]) -> None:
    for name, foreign in table.items():
        assert foreign.always or (foreign.advice and foreign.is_harmless(None)), name
        assert foreign.always or not foreign.is_harmless(object()), name
        assert not foreign.advice.endswith("."), name


def test_no_option_of_stoop_is_taken_for_a_foreign_one() -> None:
    own = {f.name for f in dataclasses.fields(EngineOptions)}
    assert not own & ENGINE_ARGS.keys()
    assert not {*own, *ENGINE_ARGS} & set(GRAPH_OPTIONS) and not set(KEYS) & COMPILATION_ARGS.keys()


# ---- graphs, by vLLM's names ----


class TheirMode(enum.Enum):
    """As vLLM's: some members have pairs for values."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)


@dataclasses.dataclass
class TheirConfig:
    mode: Any = None
    cudagraph_mode: Any = None
    cudagraph_capture_sizes: list[int] | None = None
    new_in_a_later_version: list[int] = dataclasses.field(default_factory=list)


MODES = [mode.name for mode in TheirMode]


@pytest.mark.parametrize("name", MODES)
def test_vllms_graph_modes_are_taken(name: str) -> None:
    for value in (name, name.lower(), name.title(), TheirMode[name]):
        assert resolved("cuda:0", cudagraph_mode=value).graph.mode == name.lower()
        assert resolved("cuda:0", graph_mode=value).graph.mode == name.lower()
        config = {"cudagraph_mode": value}
        for form in (config, TheirConfig(**config), SimpleNamespace(**config)):
            assert resolved("cuda:0", compilation_config=form).graph.mode == name.lower()
    text = f'{{"cudagraph_mode": "{name}"}}'
    assert resolved("cuda:0", compilation_config=text).graph.mode == name.lower()


def test_our_own_mode_has_any_case_too() -> None:
    for value in ("STEP", "Step", GraphMode.STEP):
        assert resolved("cpu", graph_mode=value).graph.mode == "step"


def test_capture_sizes_have_vllms_names() -> None:
    sizes = [4, 1, 2]
    config = {"cudagraph_capture_sizes": sizes, "level": 3}
    for options in (
        {"compilation_config": config},
        {"compilation_config": json.dumps(config)},
        {"compilation_config": TheirConfig(3, None, sizes)},
        {"compilation_config": {"cudagraph_capture_sizes": np.array(sizes)}},
        {"cuda_graph_sizes": sizes},
        {"cudagraph_capture_sizes": sizes, "capture_sizes": "1,2,4"},  # the same, said twice
    ):
        graph = resolved("cuda:0", **options).graph
        assert (graph.mode, graph.capture_sizes) == ("step", (1, 2, 4))


SIZES_OF_VLLM: list[dict[str, Any]] = [
    {"cudagraph_capture_sizes": [1, 2, 100_000]},
    {"cuda_graph_sizes": [1, 2]},
    {"cuda_graph_sizes": 1024},
    {"max_cudagraph_capture_size": 1024},
    {"compilation_config": {"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 2}},
]


@pytest.mark.parametrize("sizes", SIZES_OF_VLLM, ids=str)
def test_vllms_sizes_mean_nothing_without_graphs(
    sizes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    again = dataclasses.asdict(EngineArgs("x", **sizes))
    del again["model"], again["device"]
    for device, options in [
        ("cpu", sizes),
        ("cpu", again),
        ("cuda:0", {**sizes, "enforce_eager": True}),
        ("cuda:0", {**sizes, "graph_mode": "none"}),
    ]:
        config = resolved(device, **options)
        without = resolved(device, graph_mode="none").graph
        assert config.graph == without and not caplog.messages
        log_ignored(make_options("x", options), config)
        (message,) = caplog.messages
        assert message.startswith("ignored, since there are no graphs: ")
        assert "capture_sizes=[1, 2" in message or "max_capture_size=1024" in message
        caplog.clear()
    log_ignored(make_options("x", {}), resolved("cpu"))
    log_ignored(make_options("x", SIZES_OF_VLLM[1]), resolved("cuda:0", **SIZES_OF_VLLM[1]))
    assert not caplog.messages


def test_wrong_sizes_are_refused_by_vllms_name() -> None:
    for sizes in (["x"], [], [1, 2.5], {}):
        for options, name in [
            ({"cudagraph_capture_sizes": sizes}, "cudagraph_capture_sizes"),
            (
                {"compilation_config": {"cudagraph_capture_sizes": sizes}},
                "compilation_config.cudagraph_capture_sizes",
            ),
        ]:
            with pytest.raises(ConfigError, match=rf"^{name}=.*: use whole numbers, such as \["):
                resolved("cpu", **options)
    with pytest.raises(ConfigError, match="max_capture_size='x': use a whole number"):
        resolved("cpu", max_cudagraph_capture_size="x")


def test_our_own_sizes_need_graphs() -> None:
    for options, told in [
        ({"capture_sizes": [1, 2]}, "capture_sizes apply to graphs"),
        ({"sanitize": True}, "sanitize applies to graphs"),
        ({"sanitize": True, "capture_sizes": "1"}, "sanitize and capture_sizes apply to graphs"),
        ({"capture_sizes": [1, 2], "cuda_graph_sizes": [1, 2]}, "capture_sizes apply to graphs"),
        ({"sanitize": True, "cuda_graph_sizes": [1, 2]}, "sanitize applies to graphs"),
    ]:
        with pytest.raises(ConfigError, match=f"^{told}, and graph_mode is none: choose a mode"):
            resolved("cpu", **options)


def test_the_largest_size_has_vllms_names() -> None:
    for options in (
        {"max_cudagraph_capture_size": 64},
        {"cuda_graph_sizes": [64]},
        {"cuda_graph_sizes": 64},
        {"compilation_config": {"max_cudagraph_capture_size": 64}},
    ):
        graph = resolved("cuda:0", **options).graph
        assert (graph.capture_sizes, graph.max_capture_size) == (None, 64)
        assert resolved("cpu", **options).graph.mode == "none"
    assert resolved("cuda:0").graph.max_capture_size == 1024
    assert resolved("cuda:0").graph.more_for_prompts
    assert not resolved("cuda:0", max_cudagraph_capture_size=1024).graph.more_for_prompts
    assert not resolved("cpu", graph_mode="step").graph.more_for_prompts
    assert resolved("cpu", graph_mode="step").graph.max_capture_size == 512
    assert resolved("cuda:0", max_cudagraph_capture_size=600).graph.max_capture_size == 600
    with pytest.raises(ConfigError, match="max_capture_size=0: use a whole number of at least 1"):
        resolved("cuda:0", max_capture_size=0)
    with pytest.raises(ConfigError, match=r"max_capture_size=8 and capture_sizes=.* disagree"):
        resolved("cuda:0", max_capture_size=8, capture_sizes="4,16")


def test_older_switches_of_graphs_are_taken() -> None:
    off, full = {"use_cudagraph": False}, {"use_cudagraph": True, "full_cuda_graph": True}
    assert resolved("cuda:0", compilation_config=off).graph.mode == "none"
    assert resolved("cuda:0", compilation_config=full).graph.mode == "full"
    with pytest.raises(ConfigError, match=r"compilation_config.use_cudagraph=1: use True or False"):
        make_options("x", {"compilation_config": {"use_cudagraph": 1}})


FULL: dict[str, Any] = {"cudagraph_mode": "FULL"}
DISAGREE: list[tuple[dict[str, Any], str]] = [
    ({"graph_mode": "step", **FULL}, "cudagraph_mode='FULL' and graph_mode='step'"),
    ({"enforce_eager": True, **FULL}, "cudagraph_mode='FULL' and enforce_eager"),
    (
        {"compilation_config": FULL, "cudagraph_mode": "NONE"},
        "compilation_config.cudagraph_mode='FULL' and cudagraph_mode='NONE'",
    ),
    (
        {"compilation_config": {"cudagraph_capture_sizes": [1]}, "capture_sizes": "1,2"},
        r"compilation_config.cudagraph_capture_sizes=\[1\] and capture_sizes='1,2'",
    ),
    ({"cuda_graph_sizes": [8], "max_capture_size": 16}, r"cuda_graph_sizes=\[8\] and max_capture"),
]


@pytest.mark.parametrize(("options", "both"), DISAGREE)
def test_two_names_that_disagree_are_refused(options: dict[str, Any], both: str) -> None:
    with pytest.raises(ConfigError, match=f"^{both}.* disagree: give one of them$"):
        make_options("x", options)


def test_two_names_that_agree_are_taken() -> None:
    said = {"enforce_eager": True, "cudagraph_mode": "NONE", "graph_mode": "None"}
    assert make_options("x", said).graph_mode == "none"


REFUSED_CONFIGS: list[tuple[Any, str]] = [
    (
        {"cudagraph_mode": "STEP"},
        r"compilation_config.cudagraph_mode='STEP': use NONE, .*graph_mode",
    ),
    ({"cudagraph_mode": 2}, "compilation_config.cudagraph_mode=2: use NONE"),
    ({"inductor_passes": {"mine": len}}, "compilation_config.inductor_passes=.* no pass would run"),
    (
        {"cudagraph_mod": "FULL"},
        "key of compilation_config 'cudagraph_mod': did you mean cudagraph",
    ),
    ({3: "FULL"}, "unknown key of compilation_config 3: known are"),
    (TheirConfig(new_in_a_later_version=[1]), "unknown key of compilation_config 'new_in_a_later"),
    (SimpleNamespace(cudagraph_mode="FULL", other=1), "unknown key of compilation_config 'other'"),
    ("{", "compilation_config='{' is not JSON: write an object"),
    ("[1]", "compilation_config=.* is not supported: .*use graph_mode"),
]


@pytest.mark.parametrize(("config", "told"), REFUSED_CONFIGS)
def test_what_a_compilation_config_cannot_say_is_refused(config: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_options("x", {"compilation_config": config})


def test_what_a_compilation_config_says_in_vain_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_options("x", {"compilation_config": {"level": 3, "cudagraph_mode": "FULL"}})
    (message,) = caplog.messages
    assert "compilation_config.level=3" in message and "FULL" not in message


@pytest.mark.parametrize("name", [*GRAPH_OPTIONS, *KEYS])
def test_any_value_of_a_vllm_name_is_taken_or_refused_with_a_sentence(name: str) -> None:
    for value in ANYTHING:
        options = {name: value} if name in GRAPH_OPTIONS else {"compilation_config": {name: value}}
        try:
            resolve(make_options("x", options), tiny_spec(), "folder", "cuda:0")
        except ConfigError as error:
            refusal = str(error)
        else:
            continue
        assert "\n" not in refusal and len(refusal) < 400
        assert "capture_size" in refusal or name in refusal or "compilation_config" in refusal
