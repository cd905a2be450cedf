"""How many KV blocks fit."""

import contextlib
import logging
import os
from pathlib import Path

import torch

from stoop.config.errors import ConfigError
from stoop.config.schema import Config
from stoop.core.kv_layout import NULL_BLOCK, KVLayout

log = logging.getLogger(__name__)

GIB = 2**30
# What the KV cache takes of a CPU's memory unless told otherwise.
CPU_KV_BYTES = 4 * GIB


def allocate_kv_caches(config: Config, layout: KVLayout, num_blocks: int) -> list[torch.Tensor]:
    """One tensor a layer. Only the null block has contents, zeros, and keeps them for good.

    The rest is left as it comes: nothing is read before it is written, and a CPU hands out the
    pages of such a tensor only when they are used. But FlashInfer multiplies values of masked keys
    by 0, which must not give NaN.
    """
    dtype = getattr(torch, layout.dtype)
    zeroed = slice(None) if config.attention_backend == "flashinfer" else NULL_BLOCK
    caches = []
    for shape in layout.shapes(num_blocks):
        cache = torch.empty(shape, dtype=dtype, device=config.device.device)
        cache[:, zeroed].zero_()
        caches.append(cache)
    return caches


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
            # Twice what all slots can fill leaves the prefix cache plenty.
            useful = 2 * schedule.max_num_seqs * blocks_per_request + 1
            modest = max(CPU_KV_BYTES // layout.block_bytes, blocks_per_request + 1)
            num_blocks = min(num_blocks, useful, modest)
    if num_blocks * layout.block_bytes > num_bytes_free:
        raise ConfigError(
            f"a KV cache of {num_blocks * layout.block_bytes / GIB:.1f} GiB is more than the "
            f"{num_bytes_free / GIB:.1f} GiB that are free here: lower kv_cache_memory or "
            "num_kv_blocks"
        )
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
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                machine = int(line.split()[1]) * 1024
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
