"""Checks that a model fits into memory, and sizes the KV cache."""

import contextlib
import gc
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from stoop.config.errors import ConfigError, MemoryShortage
from stoop.config.schema import Config
from stoop.core.state import (
    DTYPE_BYTES,
    NULL_BLOCK,
    PagedState,
    StateLayout,
    TensorSpec,
    aligned_bytes,
)
from stoop.layers.stateful import StatefulLayer, stateful_layers
from stoop.models.base import Module, parameter_bytes
from stoop.models.head_loader import describe_head
from stoop.models.loader import describe_model, packed_bytes

log = logging.getLogger(__name__)

GIB = 2**30
# Default size of the KV cache on a CPU.
CPU_KV_BYTES = 4 * GIB
# Share of the memory left on a GPU for snapshots of recurrent state, by default.
DEFAULT_STATE_SHARE = 0.05

LayerState = Tensor | dict[str, Tensor]


def describe_states(config: Config, layers: Iterable[StatefulLayer]) -> StateLayout:
    """Return the layout of the layers' states."""
    return StateLayout(
        states=tuple(layer.state for layer in layers),
        block_size=config.cache.block_size,
        num_slots=config.schedule.max_num_seqs,
        query_len=config.schedule.query_len,
        dtype=config.device.kv_dtype,
    )


def _describe_modules(config: Config) -> list[Module]:
    """Build the model and its draft head without allocating memory."""
    found: list[Module] = [describe_model(config.model, config.device)]
    if config.head is not None:
        found.append(describe_head(config.head, config.device))
    return found


def check_room(config: Config) -> None:
    """Refuse, before anything is loaded, a model that cannot fit into free memory.

    Otherwise a CPU runs out of memory minutes later, and the system may kill the process without a
    message.
    """
    modules = _describe_modules(config)
    weights = weight_bytes(config)
    layout = describe_states(config, stateful_layers(*modules))
    _check_state_cache(config, layout)
    states, kv = layout.recurrent_bytes, _least_cache_bytes(config, layout)
    if weights + states + kv <= _obtainable_bytes(config):
        return
    gc.collect()  # a dropped engine may still hold its memory
    room = _obtainable_bytes(config)
    here = f"the {room / GIB:.1f} GiB free on {config.device.device}"
    stored = config.device.weight_dtype
    in_dtype = f"the weights take {weights / GIB:.1f} GiB in {stored}"
    if weights > room:
        setting = "dtype" if stored == config.device.dtype else "weight_dtype"
        narrower = "" if DTYPE_BYTES[stored] <= 2 else f", or {setting}=bfloat16"
        raise MemoryShortage(f"{in_dtype}, more than {here}", f"use a smaller model{narrower}")
    if states:
        in_dtype += f", the recurrent states of {layout.num_slots} requests {states / GIB:.1f} GiB"
    if weights + states > room:
        raise MemoryShortage(f"{in_dtype}, together more than {here}", "lower max_num_seqs")
    if weights + states + kv > room:
        cache = config.cache
        what, lower = "the KV cache", f"lower max_model_len{' or max_num_seqs' if states else ''}"
        if cache.num_blocks is not None or cache.kv_cache_memory is not None:
            lower = "lower kv_cache_memory or num_kv_blocks"
        if cache.state_cache_memory and cache.enable_prefix_caching:
            what, lower = "its caches", "lower kv_cache_memory, num_kv_blocks or state_cache_memory"
        raise MemoryShortage(
            f"{in_dtype} and {what} {kv / GIB:.1f} GiB, together more than {here}", lower
        )


def weight_bytes(config: Config) -> int:
    """Return the bytes of the weights of a model and its draft head."""
    sizes = list(map(parameter_bytes, _describe_modules(config)))
    if config.device.packed:
        sizes[0] = packed_bytes(config)
    return sum(sizes)


def _check_state_cache(config: Config, layout: StateLayout) -> None:
    given = config.cache.state_cache_memory
    if given and not layout.recurrent:
        raise ConfigError(
            f"state_cache_memory={given} is for models with recurrent layers, and this model has "
            "none: leave it out"
        )


def _least_cache_bytes(config: Config, layout: StateLayout) -> int:
    """Return the bytes of the given state cache and KV cache, or of KV for one request."""
    cache = config.cache
    snapshots = (cache.state_cache_memory or 0) if cache.enable_prefix_caching else 0
    if cache.num_blocks is None and cache.kv_cache_memory is not None:
        return cache.kv_cache_memory + snapshots
    num_blocks = cache.num_blocks or _blocks_per_request(config) + 1
    return num_blocks * layout.block_bytes + snapshots


def _blocks_per_request(config: Config) -> int:
    """Return the KV blocks of a request of the largest length."""
    return -(-config.schedule.max_model_len // config.cache.block_size)


def _obtainable_bytes(config: Config) -> int:
    """Return all memory that could be allocated, ignoring gpu_memory_utilization."""
    if config.device.device != "cpu":
        return torch.cuda.mem_get_info(config.device.device)[0]
    found = _meminfo()
    if "MemAvailable" not in found:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = found["MemAvailable"] + found.get("SwapFree", 0)
    return min(machine, _cgroup_free_bytes() or machine)


def allocate_slots(config: Config, layout: StateLayout) -> Tensor:
    """Allocate the recurrent states of all layers: a row of bytes for each slot and the sink.

    One row holds everything that a slot keeps, so that one copy saves or restores it.
    """
    shape = (layout.num_slots + 1, layout.slot_bytes)
    return torch.zeros(shape, dtype=torch.uint8, device=config.device.device)


def allocate_states(
    config: Config, layout: StateLayout, num_blocks: int, slots: Tensor
) -> list[LayerState]:
    """Allocate each layer's KV cache; tensors indexed by slot are views of `slots`.

    In a KV cache only the null block is initialized, with zeros that never change. The other blocks
    are left uninitialized: they are written before they are read, and a CPU allocates their pages
    only when they are used. If new blocks must be zeros, all blocks start as zeros.

    slots: from `allocate_slots`
    """
    states: list[LayerState] = []
    offset = 0
    for state in layout.states:
        if isinstance(state, PagedState):
            spec = state.tensor(num_blocks, layout.block_size, layout.dtype)
            cache = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=slots.device)
            cache[:, slice(None) if config.cache.zero_new_blocks else NULL_BLOCK].zero_()
            states.append(cache)
            continue
        tensors = {}
        for name, spec in state.slot_tensors(layout.query_len).items():
            tensors[name] = _slot_view(slots, spec, offset)
            offset += aligned_bytes(spec)
        states.append(tensors)
    assert offset == slots.shape[1], (offset, slots.shape)
    return states


def _slot_view(slots: Tensor, spec: TensorSpec, offset: int) -> Tensor:
    """One tensor of every slot, from this offset of each row on."""
    part = slots[:, offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype))
    return part.view(slots.shape[0], *spec.shape)


def count_snapshots(config: Config, layout: StateLayout, num_bytes_free: int) -> int:
    """Return the number of snapshots of recurrent state that the prefix cache may hold."""
    cache, size = config.cache, layout.slot_bytes
    if not cache.enable_prefix_caching or not size:
        return 0
    given = cache.state_cache_memory
    if given is None:
        if config.device.device == "cpu":
            return 0
        share = int(max(num_bytes_free, 0) * DEFAULT_STATE_SHARE)
        count = min(share // size, 4 * config.schedule.max_num_seqs)
    else:
        count = given // size
        if given and not count:
            raise ConfigError(
                f"state_cache_memory={given} holds no snapshot of the model's recurrent state, "
                f"which takes {size} bytes: raise it, or use 0 to do without"
            )
        if count * size > num_bytes_free:
            raise MemoryShortage(
                f"a state cache of {count * size / GIB:.1f} GiB is more than the "
                f"{num_bytes_free / GIB:.1f} GiB of free memory",
                "lower state_cache_memory",
            )
    if count:
        log.info("state cache: %d snapshots (%.2f GiB)", count, count * size / GIB)
    return count


def count_kv_blocks(config: Config, layout: StateLayout, num_bytes_free: int) -> int:
    """Return the number of KV blocks including the null block; refuse too few for one request."""
    schedule, cache = config.schedule, config.cache
    blocks_per_request = _blocks_per_request(config)
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
    elif not layout.paged:  # blocks take no memory
        num_blocks = 2 * schedule.max_num_seqs * blocks_per_request + 1
    elif cache.kv_cache_memory is not None:
        num_blocks = cache.kv_cache_memory // layout.block_bytes
    else:
        num_blocks = num_bytes_free // layout.block_bytes
        if config.device.device == "cpu":
            # Twice what all slots can fill leaves enough for the prefix cache.
            useful = 2 * schedule.max_num_seqs * blocks_per_request + 1
            modest = max(CPU_KV_BYTES // layout.block_bytes, blocks_per_request + 1)
            num_blocks = min(num_blocks, useful, modest)
    if num_blocks * layout.block_bytes > num_bytes_free:
        raise MemoryShortage(
            f"a KV cache of {num_blocks * layout.block_bytes / GIB:.1f} GiB is more than the "
            f"{num_bytes_free / GIB:.1f} GiB of free memory",
            "lower kv_cache_memory or num_kv_blocks",
        )
    if num_blocks - 1 < blocks_per_request:
        raise _too_few_blocks(config, layout, num_blocks - 1)
    log.info(
        "KV cache: %d blocks of %d tokens (%d tokens, %.2f GiB)",
        num_blocks - 1,
        cache.block_size,
        (num_blocks - 1) * cache.block_size,
        num_blocks * layout.block_bytes / GIB,
    )
    return num_blocks


def _too_few_blocks(config: Config, layout: StateLayout, num_blocks: int) -> ConfigError:
    schedule, cache = config.schedule, config.cache
    needed = _blocks_per_request(config) + 1  # with the null block
    beside, lower, higher = "", "max_model_len", "gpu_memory_utilization"
    if cache.num_blocks is not None:
        higher = f"num_kv_blocks to {needed}"
    elif cache.kv_cache_memory is not None:
        higher = f"kv_cache_memory to {needed * layout.block_bytes}"
    elif layout.recurrent_bytes:
        size = f"{layout.recurrent_bytes / GIB:.1f} GiB"
        beside = f" beside the recurrent states of {schedule.max_num_seqs} requests ({size})"
        lower += " or max_num_seqs"
    return ConfigError(
        f"the KV cache would hold {max(num_blocks, 0) * cache.block_size} tokens{beside}, fewer "
        f"than max_model_len={schedule.max_model_len}: lower {lower}, or raise {higher}"
    )


def free_bytes(config: Config, peak_activation_bytes: int) -> int:
    """Return the memory left for KV after loading weights, within gpu_memory_utilization."""
    share = config.cache.gpu_memory_utilization
    if config.device.device == "cpu":
        return int(_available_host_bytes() * share)
    free, total = torch.cuda.mem_get_info(config.device.device)
    used = total - free
    return int(total * share) - used - peak_activation_bytes


def _available_host_bytes() -> int:
    """Return the machine's free memory, or the container's if that is less."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    machine = _meminfo().get("MemAvailable", half)
    return min(machine, _cgroup_free_bytes() or machine)


def _meminfo() -> dict[str, int]:
    """Read /proc/meminfo as bytes by name; empty if there is none."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, amount = line.partition(":")
            found[name] = int(amount.split()[0]) * 1024
    return found


def _cgroup_free_bytes() -> int | None:
    """Return the container's free memory, with the page cache as free; None if it has no limit."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat["active_file"]) + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None
