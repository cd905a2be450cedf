"""Attention by our Triton kernels: paged, with variable query lengths, split over keys.

Nothing is planned on the host or derived from lengths: kernels read lengths where phases write
them. So the metadata is a set of views, valid for any replay and every draft decode.
"""

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from stoop.attention.base import AttentionSetup, AttentionShape
from stoop.batch.input_batch import InputBatch
from stoop.config.errors import ConfigError
from stoop.graph.support import GraphSupport
from stoop.ops.kernels.choice import KERNEL_DTYPES
from stoop.ops.kv_store import FP8


@dataclass(frozen=True)
class TritonMetadata:
    query_start_loc: Tensor  # [num_reqs + 1] int32
    context_lens: Tensor  # [num_reqs] int32
    seq_lens: Tensor  # [num_reqs] int32
    row_slots: Tensor  # [num_reqs] int64
    block_table: Tensor  # [slots + 1, max_blocks] int32
    max_query_len: int  # of a row, if the descriptor bounds it; 0 if not


class TritonBackend:
    name = "triton"
    graph_support = GraphSupport.ALWAYS

    def __init__(self, setup: AttentionSetup) -> None:
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "attention_backend=triton needs the package triton: install it, or use "
                "attention_backend=reference"
            )
        from stoop.ops.kernels import attention as kernels

        if setup.device.type != "cuda" and not kernels.INTERPRETED:
            raise ConfigError(
                f"attention_backend=triton does not run on {setup.device.type}: use "
                "attention_backend=reference"
            )
        if setup.dtype not in KERNEL_DTYPES:
            name = str(setup.dtype).removeprefix("torch.")
            raise ConfigError(
                f"attention_backend=triton has no kernels for {name}: use "
                "attention_backend=reference"
            )
        if setup.kv_dtype == FP8 and not _converts_fp8(setup.device):
            raise ConfigError(
                "a KV cache in fp8 needs a GPU of compute capability 8.9 or higher (Ada, Hopper or "
                "newer): use kv_cache_dtype=auto"
            )
        self.kernels = kernels
        self.block_table = setup.slots.block_table
        self.num_sms = kernels.count_sms(setup.device)

    def buffers(self) -> dict[str, Tensor]:
        """None: each call allocates the partial results of its splits."""
        return {}

    def build(self, batch: InputBatch, for_capture: bool = False) -> TritonMetadata:
        num_reqs = batch.num_reqs_padded
        return TritonMetadata(
            query_start_loc=batch.rows.query_start_loc[: num_reqs + 1],
            context_lens=batch.step.context_lens[:num_reqs],
            seq_lens=batch.step.seq_lens[:num_reqs],
            row_slots=batch.step.row_slots[:num_reqs],
            block_table=self.block_table,
            max_query_len=batch.query_len or self.kernels.ANY_LENGTH,
        )

    def advance(self, metadata: TritonMetadata) -> None:
        """Do nothing: no metadata is derived from the lengths."""

    def forward(
        self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: TritonMetadata
    ) -> Tensor:
        num_reqs = metadata.row_slots.shape[0]
        plan = self.kernels.plan_attention(
            q, shape.num_kv_heads, num_reqs, metadata.max_query_len, self.num_sms
        )
        size = plan.partial_size(shape.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.kernels.paged_attention(
            q,
            cache,
            metadata.query_start_loc,
            metadata.context_lens,
            metadata.seq_lens,
            metadata.row_slots,
            metadata.block_table,
            shape.scale,
            shape.value_scale,
            shape.window or self.kernels.FULL_ATTENTION,
            plan.max_query_len,
            plan.mixed,
            plan.num_splits,
            torch.empty(size, dtype=torch.float32, device=q.device),
            out,
        )
        return out


def _converts_fp8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
