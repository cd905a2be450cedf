"""A model that does not fit is refused before it is loaded; running out of memory is a sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop.cli.failures import explain
from stoop.config.errors import ConfigError, MemoryShortage
from stoop.config.resolve import make_options, resolve
from stoop.config.schema import Config
from stoop.core.state import StateLayout
from stoop.layers.stateful import stateful_layers
from stoop.models.loader import build_model, describe_model
from stoop.worker import memory
from stoop.worker.memory import check_room, describe_states, weight_bytes
from support.specs import tiny_spec


def config(**options: Any) -> tuple[Config, StateLayout]:
    settled = resolve(make_options("x", options), tiny_spec(), "folder", "cpu")
    layers = stateful_layers(describe_model(settled.model, settled.device))
    return settled, describe_states(settled, layers)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the machine has left."""
    return lambda count: monkeypatch.setattr(
        memory, "_meminfo", lambda: {"MemAvailable": count, "SwapFree": 0}
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_counted_as_they_are_loaded(dtype: str) -> None:
    settled, _ = config(dtype=dtype)
    model = build_model(settled)
    assert weight_bytes(settled) == sum(p.numel() * p.element_size() for p in model.parameters())


def test_the_dtype_of_weights_counts(free: Any) -> None:
    settled, _ = config(dtype="float64", weight_dtype="float32")
    model = build_model(settled)
    assert {p.dtype for p in model.parameters() if p.dim() > 1} == {torch.float32}
    assert {p.dtype for p in model.parameters() if p.dim() == 1} == {torch.float64}
    assert weight_bytes(settled) == sum(p.nbytes for p in model.parameters())
    free(weight_bytes(settled) - 1)
    with pytest.raises(MemoryShortage, match=r"GiB in float32, .* or weight_dtype=bfloat16"):
        check_room(settled)


def test_what_fits_is_let_through_to_the_byte(free: Any) -> None:
    settled, layout = config(num_kv_blocks=9, dtype="float32")
    needed = weight_bytes(settled) + 9 * layout.block_bytes
    free(needed)
    check_room(settled)
    free(needed - 1)
    with pytest.raises(MemoryShortage, match="lower kv_cache_memory or num_kv_blocks") as caught:
        check_room(settled)
    assert isinstance(caught.value, ConfigError)
    free(weight_bytes(settled) - 1)
    with pytest.raises(MemoryShortage, match=r"weights take .* use a smaller model, or dtype=bf"):
        check_room(settled)


def test_without_a_given_size_one_request_must_fit(free: Any) -> None:
    settled, layout = config(max_model_len=64, block_size=16)
    free(weight_bytes(settled) + 5 * layout.block_bytes)
    check_room(settled)
    free(weight_bytes(settled) + 5 * layout.block_bytes - 1)
    with pytest.raises(MemoryShortage, match="lower max_model_len"):
        check_room(settled)


def test_swap_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    settled, _ = config()
    found = {"MemAvailable": 0, "SwapFree": 2**40}
    monkeypatch.setattr(memory, "_meminfo", lambda: found)
    check_room(settled)


def test_a_containers_file_cache_is_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 400\nactive_file 300\n")
    monkeypatch.setattr(memory, "Path", lambda _: tmp_path)
    assert memory._cgroup_free_bytes() == 800
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_free_bytes() is None


def test_running_out_of_memory_is_a_sentence() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    on_cpu = explain(caught.value)
    assert on_cpu is not None and "\n" not in on_cpu
    assert on_cpu.startswith("error: out of memory (tried to allocate 134217728.00 GiB): use a ")
    on_gpu = explain(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU"))
    assert on_gpu is not None and "(tried to allocate 2.00 GiB)" in on_gpu and "lower" in on_gpu
    for error in (MemoryError(), OSError(12, "Cannot allocate memory")):
        assert (explain(error) or "").startswith("error: out of memory: ")


def test_other_errors_keep_their_traceback() -> None:
    assert explain(RuntimeError("shapes differ")) is None
    assert explain(AssertionError()) is None
    assert explain(PermissionError(13, "Permission denied", "/x")) == "error: /x: Permission denied"


def test_a_gpu_has_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    settled, layout = config(num_kv_blocks=9)
    settled = replace(settled, device=replace(settled.device, device="cuda:0"))
    needed = weight_bytes(settled) + 9 * layout.block_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed, 2**40))
    check_room(settled)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed - 1, 2**40))
    with pytest.raises(MemoryShortage, match="free on cuda:0"):
        check_room(settled)
