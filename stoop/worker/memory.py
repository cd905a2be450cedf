"""How many KV blocks fit."""

import logging
import os
from pathlib import Path

import torch

from stoop.config.errors import ConfigError
from stoop.config.schema import Config
from stoop.core.kv_layout import KVLayout

log = logging.getLogger(__name__)

GIB = 2**30


def allocate_kv_caches(config: Config, layout: KVLayout, num_blocks: int) -> list[torch.Tensor]:
    """One zeroed tensor a layer; the null block stays zero for good."""
    dtype = getattr(torch, layout.dtype)
    shape = layout.shape(num_blocks)
    device = config.device.device
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]


def count_kv_blocks(config: Config, layout: KVLayout, num_bytes_free: int) -> int:
    """Blocks for the memory given, the null block included; refused if a request cannot fit."""
    schedule, cache = config.schedule, config.cache
    blocks_per_request = -(-schedule.max_model_len // cache.block_size)
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
    elif cache.kv_cache_memory is not None:
        num_blocks = cache.kv_cache_memory // layout.block_bytes
    else:
        num_blocks = num_bytes_free // layout.block_bytes
        if config.device.device == "cpu":
            # More than every slot can fill would serve the prefix cache alone: twice is plenty.
            num_blocks = min(num_blocks, 2 * schedule.max_num_seqs * blocks_per_request + 1)
    if num_blocks - 1 < blocks_per_request:
        held = max(num_blocks - 1, 0) * cache.block_size
        raise ConfigError(
            f"the KV cache would hold {held} tokens, fewer than max_model_len="
            f"{schedule.max_model_len}: lower max_model_len, or raise kv_cache_memory or "
            "gpu_memory_utilization"
        )
    log.info(
        "KV cache: %d blocks of %d tokens (%d tokens, %.2f GiB)",
        num_blocks - 1,
        cache.block_size,
        (num_blocks - 1) * cache.block_size,
        num_blocks * layout.block_bytes / GIB,
    )
    return num_blocks


def free_bytes(config: Config, peak_activation_bytes: int) -> int:
    """What the share of memory that we may use leaves for KV, weights being loaded."""
    share = config.cache.gpu_memory_utilization
    if config.device.device == "cpu":
        return int(_available_host_bytes() * share)
    free, total = torch.cuda.mem_get_info(config.device.device)
    used = total - free
    return int(total * share) - used - peak_activation_bytes


def _available_host_bytes() -> int:
    """Free memory of the machine, or of the container's limit if that is tighter."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                machine = int(line.split()[1]) * 1024
                break
    except OSError:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(machine, _cgroup_free_bytes() or machine)


def _cgroup_free_bytes() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        return int(limit) - int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None
