"""What layers keep, as numbers: shapes, bytes, and what a request reads."""

import pytest
import torch

from stoop.config.resolve import make_options, resolve
from stoop.core.state import PagedState, RecurrentState, StateLayout, TensorSpec
from stoop.layers.stateful import number_layers, stateful_layers
from stoop.models.loader import describe_model
from stoop.worker.memory import allocate_slots, allocate_states, describe_states
from support.specs import tiny_spec

VECTOR = RecurrentState(
    tensors={"total": TensorSpec((3, 5), "float32")}, per_draft={"log": TensorSpec((5,), "float64")}
)


def layout(*states: PagedState | RecurrentState, dtype: str = "float32") -> StateLayout:
    return StateLayout(states, block_size=4, num_slots=6, query_len=3, dtype=dtype)


def test_keys_and_values_are_one_tensor_a_layer() -> None:
    spec = PagedState(2, 8, 8).tensor(7, 4, "float32")
    assert spec == TensorSpec((2, 7, 4, 2, 8), "float32")
    assert PagedState(2, 8, 8, dtype="bfloat16").tensor(7, 4, "float32").dtype == "bfloat16"


def test_values_may_be_a_view_of_the_keys() -> None:
    latent = PagedState(num_heads=1, key_dim=576, value_dim=0)
    assert latent.tensor(7, 4, "float32").shape == (1, 7, 4, 1, 576)
    assert latent.token_elements == 576
    with pytest.raises(AssertionError):
        PagedState(num_heads=1, key_dim=576, value_dim=512)


@pytest.mark.parametrize(
    ("dtype", "size"), {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}.items()
)
def test_bytes_of_a_block_are_summed_over_layers(dtype: str, size: int) -> None:
    target, head = PagedState(2, 8, 8), PagedState(5, 16, 16)
    assert layout(target, target, dtype=dtype).block_bytes == 2 * 2 * 4 * 2 * 8 * size
    both = layout(target, target, head, dtype=dtype)
    assert both.block_bytes == (2 * 2 * 4 * 2 * 8 + 2 * 4 * 5 * 16) * size


def test_bytes_of_a_slot_count_the_log_for_every_token_of_a_decode() -> None:
    mixed = layout(PagedState(2, 8, 8), VECTOR, VECTOR)
    assert mixed.slot_bytes == 2 * (128 + 128)  # 15 * 4 and 3 * 5 * 8 bytes, aligned
    assert mixed.recurrent_bytes == 7 * mixed.slot_bytes  # and the sink
    assert mixed.block_bytes == layout(PagedState(2, 8, 8)).block_bytes


def test_a_request_reads_its_context_or_its_window_and_moves_its_recurrent_state() -> None:
    full, windowed = PagedState(2, 8, 8), PagedState(2, 8, 8, window=10)
    every = layout(full, windowed, VECTOR)
    token = 2 * 16 * 4
    assert every.context_bytes(100) == (100 + 10) * token + 2 * 15 * 4
    assert every.context_bytes(4) == (4 + 4) * token + 2 * 15 * 4
    assert every.context_bytes(100, every.states[:1]) == 100 * token


def test_a_model_says_what_its_layers_keep() -> None:
    options = make_options("x", {"num_kv_blocks": 9, "kv_cache_dtype": "bfloat16"})
    config = resolve(options, tiny_spec(), "folder", "cpu")
    layers = stateful_layers(describe_model(config.model, config.device))
    number_layers(layers)
    assert [layer.index for layer in layers] == list(range(len(layers))) == [0]
    found = describe_states(config, layers)
    assert found.states == (PagedState(1, 4, 4),) and found.dtype == "bfloat16"


def test_states_are_allocated_as_declared_and_recurrent_ones_only_once() -> None:
    options = make_options("x", {"num_kv_blocks": 9, "max_num_seqs": 6})
    config = resolve(options, tiny_spec(), "folder", "cpu")
    mixed = layout(PagedState(2, 8, 8), VECTOR)
    slots = allocate_slots(config, mixed)
    first = allocate_states(config, mixed, 1, slots)
    second = allocate_states(config, mixed, 9, slots)
    assert [tuple(s[0].shape) for s in (first, second)] == [(2, 1, 4, 2, 8), (2, 9, 4, 2, 8)]
    assert not second[0][:, 0].any()  # the null block
    assert isinstance(first[1], dict) and isinstance(second[1], dict)
    assert {name: tuple(t.shape) for name, t in second[1].items()} == {
        "total": (7, 3, 5),
        "log": (7, 3, 5),
    }
    assert [t.dtype for t in second[1].values()] == [torch.float32, torch.float64]
    assert all(second[1][name].data_ptr() == t.data_ptr() for name, t in first[1].items())


def test_a_row_of_bytes_holds_all_that_a_slot_keeps() -> None:
    config = resolve(make_options("x", {}), tiny_spec(), "folder", "cpu")
    wide = RecurrentState(tensors={"matrix": TensorSpec((33,), "bfloat16")})
    mixed = layout(VECTOR, PagedState(2, 8, 8), wide)
    slots = allocate_slots(config, mixed)
    assert slots.shape == (7, mixed.slot_bytes) == (7, 3 * 128) and not slots.any()
    states = allocate_states(config, mixed, 2, slots)
    tensors = [t for state in states if isinstance(state, dict) for t in state.values()]
    assert all(t.stride(0) * t.element_size() == mixed.slot_bytes for t in tensors)
    assert all(t[3].is_contiguous() and t[3].data_ptr() % 64 == 0 for t in tensors)
    for value, tensor in enumerate(tensors, start=1):
        tensor[3] = value
    slots[5] = slots[3]
    assert [set(t[5].flatten().tolist()) for t in tensors] == [{1.0}, {2.0}, {3.0}]
    assert not any(t[:3].any() or t[4].any() or t[6].any() for t in tensors)
