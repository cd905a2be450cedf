"""Configs of hybrid models that cannot be loaded: refused with a sentence that says what to do."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from stoop.config.errors import CheckpointError, ConfigError, StoopError
from stoop.config.resolve import make_options, resolve
from stoop.config.schema import Config
from stoop.models.registry import find_family, read_model_spec
from stoop.worker.device import check_sizes
from stoop.worker.runner import ModelRunner
from support.checkpoints import ARCHITECTURES, CheckpointStore, edit_json

HYBRIDS = ("lfm2", "granite-hybrid", "bamba", "qwen3.5")
# Keys that families read beside those that transformers writes.
MORE_KEYS = {
    "lfm2": ("block_ff_dim", "tie_embedding", "full_attn_idxs"),
    "granite-hybrid": ("layers_block_type",),
    "bamba": ("partial_rotary_factor",),
    "qwen3.5": (
        *("partial_rotary_factor", "full_attention_interval", "mtp_num_hidden_layers"),
        *("attn_output_gate", "output_gate_type"),
    ),
}
ROPE_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor", "mrope_section")
# One or two of each JSON type, and numbers that no machine can serve.
VALUES: list[Any] = [
    *(None, True, -1, 0, 3, 1.5, 2**40, 10**400, float("inf"), float("nan")),
    *("", "x", [], [5], ["x"], [None], [[]], [0.0, 10**400], {}, {"__float__": "Infinity"}),
]


@functools.cache
def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(ARCHITECTURES[name].config().to_json_string(use_diff=False))
    return config | {"architectures": [ARCHITECTURES[name].model_class.__name__]}


def read(name: str, **changes: Any) -> Any:
    config = config_of(name) | changes
    architecture = config["architectures"][0]
    return find_family(architecture).read_spec(config, architecture)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("lfm2", {"layer_types": ["conv"] * 3}, "3 layer_types for 4 layers: fix the config"),
    ("lfm2", {"layer_types": "conv"}, "'conv' layer_types for 4 layers"),
    ("lfm2", {"layer_types": ["conv"] * 3 + ["mamba"]}, "'mamba' among its layer_types: use"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [4]}, "a list of layers is needed: fix"),
    ("lfm2", {"num_key_value_heads": 3}, "which 3 key-value heads do not divide: fix"),
    ("granite-hybrid", {"layer_types": ["mamba"] * 4}, "4 layer_types for 3 layers: fix"),
    ("granite-hybrid", {"layer_types": ["mamba", [], "mamba"]}, "among its layer_types: use"),
    ("granite-hybrid", {"layer_types": ["mamba", "conv", "mamba"]}, "'conv' among its layer_types"),
    (
        "granite-hybrid",
        {"num_local_experts": 4},
        "num_local_experts=4.*use a Granite 4.0 H without",
    ),
    ("granite-hybrid", {"num_local_experts": "x"}, "stoop loads dense ones only: use"),
    ("granite-hybrid", {"position_embedding_type": "alibi"}, "'alibi': use a model with rope"),
    ("granite-hybrid", {"mamba_n_heads": 5}, "mamba_n_heads=5, which do not divide the 128.*fix"),
    ("granite-hybrid", {"mamba_d_head": 16}, "4 mamba heads of 16 values .* is 128: fix"),
    ("granite-hybrid", {"mamba_d_head": "wide"}, "mamba_d_head='wide' where a whole number"),
    ("granite-hybrid", {"mamba_n_groups": 3}, "which 3 groups do not divide: fix"),
    ("granite-hybrid", {"mamba_d_state": 1 << 24}, "more than stoop supports: fix"),
    (
        "granite-hybrid",
        {"mamba_expand": 1 << 24, "mamba_d_head": "auto"},
        "more than stoop supports: fix",
    ),
    ("granite-hybrid", {"logits_scaling": 0}, "logits_scaling=0 where a positive number"),
    ("granite-hybrid", {"residual_multiplier": "x"}, "residual_multiplier='x' where a number"),
    ("granite-hybrid", {"time_step_limit": [1.0, 0.5]}, "two rising numbers are needed: fix"),
    ("granite-hybrid", {"time_step_limit": [0.0]}, "two rising numbers are needed: fix"),
    ("bamba", {"attn_layer_indices": [1, 3]}, "a list of layers is needed: fix"),
    ("bamba", {"attn_layer_indices": 1}, "attn_layer_indices=1 where a list of layers"),
    ("bamba", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "fix partial_rotary_factor"),
    ("bamba", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: use"),
    ("granite-hybrid", {"layers_block_type": ["mamba"]}, "1 layer_types for 3 layers: fix"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_broken_configs_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        read(name, **changes)
    assert "\n" not in str(refusal.value)


UNSERVED: list[tuple[str, dict[str, Any], str]] = [
    ("lfm2", {"conv_L_cache": 9}, "convolutions of width 9, .* serve widths of 2 to 8"),
    ("lfm2", {"conv_L_cache": 1}, "convolutions of width 1, "),
    ("bamba", {"mamba_d_conv": 12}, "convolutions of width 12, "),
    ("qwen3.5", {"linear_conv_kernel_dim": 9}, "convolutions of width 9, "),
    ("qwen3.5", {"linear_key_head_dim": 24}, "keys of 24 .* powers of two from 16 on"),
    ("qwen3.5", {"linear_value_head_dim": 8}, "values of 8, .* powers of two from 16 on"),
]


@pytest.mark.parametrize(("name", "changes", "message"), UNSERVED)
def test_sizes_without_a_gpu_kernel_are_refused_on_a_gpu(
    name: str, changes: dict[str, Any], message: str
) -> None:
    """Before anything is loaded; the references serve a CPU, and float64."""
    options, spec = make_options("x", {"dtype": "bfloat16"}), read(name, **changes)
    config = resolve(options, spec, "folder", "cuda:0")
    with pytest.raises(ConfigError, match=f"^the model has .*{message}.*: use device=cpu$"):
        ModelRunner(config)
    check_sizes(resolve(options, spec, "folder", "cpu"))
    check_sizes(resolve(make_options("x", {"dtype": "float64"}), spec, "folder", "cuda:0"))
    check_sizes(resolve(options, read(name), "folder", "cuda:0"))


MOST_TOKENS = {  # from the largest tensors that scans read and write, by config
    "qwen3.5": lambda c: max(
        2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
        + c["linear_num_value_heads"] * c["linear_value_head_dim"],
        c["linear_num_value_heads"] * 64,
    ),
    "bamba": lambda c: (
        c["mamba_expand"] * c["hidden_size"] + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    ),
}


WIDE = {  # enough to reach the limit
    "qwen3.5": {"linear_num_value_heads": 64, "linear_value_head_dim": 16},
    "bamba": {"mamba_n_groups": 2, "mamba_d_state": 1024},
}


@pytest.mark.parametrize("name", MOST_TOKENS)
def test_steps_too_long_for_32_bits_are_refused_on_a_gpu(name: str) -> None:
    """Scans count elements with 32 bits: past them, they would read and write elsewhere."""
    wide = WIDE[name]
    most = (2**31 - 1) // MOST_TOKENS[name](config_of(name) | wide)
    spec = read(name, **wide)

    def settle(tokens: int, device: str, dtype: str = "bfloat16") -> Config:
        options = {"dtype": dtype, "max_num_batched_tokens": tokens}
        return resolve(make_options("x", options), spec, "folder", device)

    check_sizes(settle(most, "cuda:0"))
    with pytest.raises(ConfigError, match=rf"tokens={most + 1} is more than the {most} .*: lower"):
        ModelRunner(settle(most + 1, "cuda:0"))
    check_sizes(settle(most + 1, "cpu"))
    check_sizes(settle(most + 1, "cuda:0", "float64"))


def test_short_convolutions_take_steps_of_any_length() -> None:
    """Their kernel counts with 64 bits."""
    options = make_options("x", {"dtype": "bfloat16", "max_num_batched_tokens": 2**22})
    check_sizes(resolve(options, read("lfm2"), "folder", "cuda:0"))


@pytest.mark.parametrize("name", HYBRIDS)
def test_values_of_a_wrong_type_are_refused_or_harmless(name: str) -> None:
    config = config_of(name)
    keys = config.keys() - {"architectures"} | set(MORE_KEYS[name])
    changes = [{key: value} for key in keys for value in VALUES]
    changes += [
        {"rope_parameters": config["rope_parameters"] | {key: value}}
        for key in ROPE_KEYS
        for value in VALUES
    ]
    messages = []
    for change, kinds in itertools.product(changes, ({}, {"layer_types": None})):
        try:
            hash(read(name, **change | kinds))
        except StoopError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert not any("\n" in message or len(message) > 400 for message in messages)


@pytest.mark.parametrize("name", HYBRIDS)
def test_null_means_that_a_key_is_missing(name: str) -> None:
    config = config_of(name)
    for key in config.keys() - {"architectures"} | set(MORE_KEYS[name]):
        rest = {other: value for other, value in config.items() if other != key}
        assert outcome(rest | {key: None}) == outcome(rest), key


def outcome(config: dict[str, Any]) -> Any:
    architecture = config["architectures"][0]
    try:
        return find_family(architecture).read_spec(config, architecture)
    except StoopError as error:
        return str(error)


def test_old_spellings_mean_the_same(checkpoints: CheckpointStore) -> None:
    """As transformers 4 and the hub's first checkpoints have it."""
    assert read("granite-hybrid", layer_types=["mamba", "attention", "mamba"]) == read(
        "granite-hybrid", layer_types=["linear_attention", "full_attention", "linear_attention"]
    )
    for other in (None, ["attention"] * 3):
        kinds = ["mamba", "attention", "mamba"]
        assert read("granite-hybrid", layers_block_type=kinds, layer_types=other) == read(
            "granite-hybrid"
        )
    assert read("granite-hybrid", position_embedding_type="nope") == read("granite-hybrid")
    for limits in (None, [0.0, float("inf")], [0, {"__float__": "Infinity"}]):
        assert read("granite-hybrid", time_step_limit=limits) == read("granite-hybrid")
    assert read("granite-hybrid", mamba_d_head="auto") == read("granite-hybrid", mamba_d_head=32)
    assert read("lfm2", layer_types=None, full_attn_idxs=[1]) == read("lfm2")
    assert read("lfm2", tie_embedding=True, tie_word_embeddings=None) == read("lfm2")
    old_rope = {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": None}
    assert read("bamba", **old_rope) == read("bamba")
    assert read("bamba").rotary_dim == 8
    for gate in (None, "silu"):
        assert read("qwen3.5", output_gate_type=gate) == read("qwen3.5")
    assert read("qwen3.5", attn_output_gate=True) == read("qwen3.5")
    whole = config_of("qwen3.5")["rope_parameters"] | {"partial_rotary_factor": None}
    for fraction, dimensions in ((None, 8), (0.5, 16)):
        found = read("qwen3.5", rope_parameters=whole, partial_rotary_factor=fraction)
        assert found.rotary_dim == dimensions


@pytest.mark.parametrize("name", HYBRIDS)
def test_an_absent_key_means_what_transformers_assumes(
    checkpoints: CheckpointStore, tmp_path: Path, name: str
) -> None:
    """Of keys that change the sizes of no tensor, and of biases."""
    keys = ("rms_norm_eps", "norm_eps", "conv_bias", "mamba_conv_bias", "mamba_proj_bias")
    keys += ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
    keys += ("logits_scaling", "time_step_limit", "tie_word_embeddings", "attention_bias")
    keys += ("num_key_value_heads",)
    full = config_of(name) | {"num_attention_heads": 32, "head_dim": 8}
    assumed = ARCHITECTURES[name].config_class()
    for key in keys:
        if key in full and hasattr(assumed, key):
            path = tmp_path / key / "config.json"
            path.parent.mkdir()
            path.write_text(json.dumps(full))
            edit_json(path, **{key: None})
            value = getattr(assumed, key)
            value = list(value) if isinstance(value, tuple) else value
            assert read_model_spec(path.parent) == read_as(path, full | {key: value}), key


def read_as(path: Path, config: dict[str, Any]) -> Any:
    path.write_text(json.dumps(config))
    return read_model_spec(path.parent)
