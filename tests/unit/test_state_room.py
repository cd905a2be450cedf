"""Memory of models with recurrent layers: states first, then snapshots; KV gets the rest."""

from dataclasses import replace
from typing import Any

import pytest

from stoop.config.errors import ConfigError, MemoryShortage
from stoop.config.resolve import make_options, resolve
from stoop.config.schema import Config
from stoop.core.state import StateLayout
from stoop.layers.stateful import stateful_layers
from stoop.models.lfm2 import ARCHITECTURE, read_spec
from stoop.models.loader import describe_model
from stoop.worker import memory
from stoop.worker.memory import (
    check_room,
    count_kv_blocks,
    count_snapshots,
    describe_states,
    weight_bytes,
)
from support.specs import tiny_spec

SPEC = read_spec(
    {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "layer_types": ["conv", "full_attention"],
        "torch_dtype": "float32",
    },
    ARCHITECTURE,
)


def config(spec: Any = SPEC, **options: Any) -> tuple[Config, StateLayout]:
    settled = resolve(make_options("x", options), spec, "folder", "cpu")
    layers = stateful_layers(describe_model(settled.model, settled.device))
    return settled, describe_states(settled, layers)


def on_gpu(settled: Config) -> Config:
    return replace(settled, device=replace(settled.device, device="cuda:0"))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the machine has left."""
    return lambda count: monkeypatch.setattr(
        memory, "_meminfo", lambda: {"MemAvailable": count, "SwapFree": 0}
    )


def test_states_that_do_not_fit_are_named_with_what_to_lower(free: Any) -> None:
    settled, layout = config(max_num_seqs=500, num_kv_blocks=9)
    needed = weight_bytes(settled) + layout.recurrent_bytes
    assert layout.recurrent_bytes == 501 * layout.slot_bytes
    free(needed + 9 * layout.block_bytes)
    check_room(settled)
    free(needed - 1)
    says = r"the weights take .* GiB .*, the recurrent states of 500 requests .* GiB, together more"
    with pytest.raises(MemoryShortage, match=rf"{says}.*: lower max_num_seqs"):
        check_room(settled)
    free(needed)  # the states fit now, and the KV cache does not
    with pytest.raises(MemoryShortage, match=r"and the KV cache .*lower kv_cache_memory or num_kv"):
        check_room(settled)
    settled, layout = config(max_num_seqs=500)  # KV for one request is needed
    free(weight_bytes(settled) + layout.recurrent_bytes)
    with pytest.raises(MemoryShortage, match=r"KV cache .*: lower max_model_len or max_num_seqs$"):
        check_room(settled)
    free(weight_bytes(settled) - 1)
    with pytest.raises(MemoryShortage, match="use a smaller model"):
        check_room(settled)


def test_states_that_leave_too_little_for_kv_are_named() -> None:
    """On a GPU, activations take memory that is known only after loading."""
    settled, layout = config(max_num_seqs=500)
    with pytest.raises(
        ConfigError,
        match=r"hold 0 tokens beside the recurrent states of 500 requests \(\d\.\d GiB\), fewer "
        "than max_model_len=64: lower max_model_len or max_num_seqs, or raise",
    ):
        count_kv_blocks(settled, layout, 0)
    settled, layout = config(kv_cache_memory=layout.block_bytes)  # states do not matter then
    enough = -(-64 // settled.cache.block_size) + 1
    size = enough * layout.block_bytes
    with pytest.raises(
        ConfigError, match=rf"0 tokens, fewer .*, or raise kv_cache_memory to {size}"
    ):
        count_kv_blocks(settled, layout, 2**30)
    settled, layout = config(kv_cache_memory=size)
    assert count_kv_blocks(settled, layout, 2**30) == enough
    settled, layout = config(num_kv_blocks=enough - 1)
    with pytest.raises(ConfigError, match=rf"or raise num_kv_blocks to {enough}$"):
        count_kv_blocks(settled, layout, 2**30)


def test_a_given_state_cache_counts(free: Any) -> None:
    settled, layout = config(num_kv_blocks=9, state_cache_memory="1MiB")
    needed = weight_bytes(settled) + layout.recurrent_bytes + 9 * layout.block_bytes
    free(needed + 2**20)
    check_room(settled)
    free(needed + 2**20 - 1)
    with pytest.raises(
        MemoryShortage, match=r"and its caches .*, num_kv_blocks or state_cache_mem"
    ):
        check_room(settled)
    settled, _ = config(num_kv_blocks=9, state_cache_memory="1MiB", enable_prefix_caching=False)
    free(needed)
    check_room(settled)


def test_a_given_size_holds_whole_snapshots() -> None:
    size = config()[1].slot_bytes
    for count in (1, 7):
        for spare in (0, size - 1):
            settled, layout = config(state_cache_memory=count * size + spare)
            assert count_snapshots(settled, layout, 2**30) == count
    assert count_snapshots(*config(state_cache_memory=0), 2**30) == 0
    with pytest.raises(ConfigError, match=rf"={size - 1} holds no snapshot .* takes {size} bytes"):
        count_snapshots(*config(state_cache_memory=size - 1), 2**30)
    with pytest.raises(MemoryShortage, match="lower state_cache_memory"):
        count_snapshots(*config(state_cache_memory=9 * size), 9 * size - 1)


def test_the_default_is_a_share_of_what_a_gpu_has_left() -> None:
    settled, layout = config(max_num_seqs=16)
    size = layout.slot_bytes
    assert count_snapshots(settled, layout, 2**30) == 0  # a CPU
    settled = on_gpu(settled)
    assert count_snapshots(settled, layout, 20 * 10 * size) == 10
    assert count_snapshots(settled, layout, 20 * size - 1) == 0
    assert count_snapshots(settled, layout, 2**40) == 4 * 16
    assert count_snapshots(settled, layout, -5) == 0
    off = on_gpu(config(enable_prefix_caching=False, state_cache_memory="1GiB")[0])
    assert count_snapshots(off, layout, 2**40) == 0


def test_models_without_recurrent_layers_refuse_it(free: Any) -> None:
    free(2**40)
    settled, layout = config(tiny_spec(), state_cache_memory="1MiB")
    with pytest.raises(ConfigError, match="is for models with recurrent layers, and this model ha"):
        check_room(settled)
    for harmless in (0, None):
        settled, layout = config(tiny_spec(), state_cache_memory=harmless)
        check_room(settled)
        assert count_snapshots(on_gpu(settled), layout, 2**40) == 0


@pytest.mark.parametrize(("given", "size"), [("2GiB", 2**31), (5, 5), ("0", 0), (0, 0), ("0GB", 0)])
def test_sizes_are_read_as_those_of_the_kv_cache(given: Any, size: int) -> None:
    assert config(state_cache_memory=given)[0].cache.state_cache_memory == size


@pytest.mark.parametrize("given", ["lots", -1, "1XB", True, ""])
def test_other_sizes_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"state_cache_memory=.*such as 2147483648 or 2GiB, or 0"):
        config(state_cache_memory=given)
