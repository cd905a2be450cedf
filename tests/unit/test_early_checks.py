"""Options that are wrong for every model are refused without one, and no others are."""

import random
from typing import Any

import pytest

from stoop.config.check import check_options
from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options, resolve
from support.specs import tiny_spec

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float8"}, "float8"),
    ({"device": "tpu"}, "cuda:N"),
    ({"device": "cuda:x"}, "cuda:N"),
    ({"device": 5}, "cuda:N"),
    ({"load_format": "pickle"}, "dummy"),
    ({"max_model_len": 0.5}, "max_model_len=0.5"),
    ({"max_model_len": 0}, "max_model_len=0"),
    ({"max_model_len": "long"}, "max_model_len='long'"),
    ({"max_num_seqs": -1}, "max_num_seqs=-1"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
    ({"block_size": 24}, "power of two"),
    ({"num_kv_blocks": 1}, "num_kv_blocks=1"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
    ({"kv_cache_memory": "lots"}, "2GiB"),
    ({"run_ahead": 9}, "run_ahead=9"),
    ({"run_ahead": 1, "attention_backend": "flashinfer"}, "run_ahead=0"),
    ({"graph_mode": "fast"}, "full_and_piecewise"),
    ({"graph_mode": "none", "sanitize": True}, "choose a mode"),
    ({"graph_mode": "step", "capture_sizes": "1,two"}, "such as 1,2,4,8"),
    ({"enable_chunked_prefill": "no"}, "True or False"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16, "max_model_len": 64}, "hold"),
    ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_seqs=64"),
    ({"attention_backend": "magic"}, "reference"),
    ({"speculative_config": "{"}, "not JSON"),
    ({"speculative_config": {"method": "magic"}}, "magic"),
]


@pytest.mark.parametrize(("options", "pattern"), WRONG)
def test_wrong_options_are_refused_without_a_model(options: dict, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        check_options(make_options("x", options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_model_len": 10**9},  # a model may have so many positions
        {"max_num_batched_tokens": 64},  # too few for 256 requests on a GPU, not for 16 on a CPU
        {"capture_sizes": "1,2"},  # there are graphs on a GPU
        {"graph_mode": "step", "capture_sizes": "8192"},  # as many tokens as a GPU's steps have
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
        {"speculative_config": None},
        {"device": "cuda:3"},  # not looked for: that takes torch
    ],
)
def test_what_some_model_and_device_allow_is_let_through(options: dict) -> None:
    check_options(make_options("x", options))


CHOICES: dict[str, list[Any]] = {
    "device": ["auto", "cpu", "cuda:0"],
    "dtype": ["auto", "float32", "bfloat16", "float8"],
    "max_model_len": [None, 1, 16, 100],
    "max_num_seqs": [None, 1, 20, 300],
    "max_num_batched_tokens": [None, 1, 20, 300, 4000],
    "enable_chunked_prefill": [True, False],
    "block_size": [1, 16, 24],
    "num_kv_blocks": [None, 1, 50],
    "graph_mode": ["auto", "none", "step", "fast"],
    "capture_sizes": [None, "1,2", "1,3000", "x"],
    "sanitize": [False, True],
    "run_ahead": [None, 0, 2, 9],
    "attention_backend": ["auto", "reference", "flashinfer"],
}


def test_no_options_are_refused_that_an_engine_would_take() -> None:
    source = random.Random(7)
    num_taken = num_refused = 0
    for _ in range(4000):
        names = source.sample(list(CHOICES), 4)
        try:
            options = make_options("x", {name: source.choice(CHOICES[name]) for name in names})
        except ConfigError:
            num_refused += 1
            continue
        devices = ("cpu", "cuda:0") if options.device == "auto" else (options.device,)
        for device in devices:
            try:
                resolve(options, tiny_spec(), "folder", device)
            except ConfigError:
                num_refused += 1
                continue
            num_taken += 1
            check_options(options)
    assert num_taken > 500 and num_refused > 500
