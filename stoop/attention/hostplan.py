"""Attention planned on the host, as FlashInfer does, in plain torch.

Before each step the host writes the pages of each request (index pointers and page indices) to
persistent buffers that a captured graph reads. It exists to exercise everything that can go stale
in such a plan on every machine, and as a check of the reference.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.attention.base import AttentionSetup, AttentionShape
from stoop.batch.input_batch import InputBatch
from stoop.graph.support import GraphSupport
from stoop.ops.kv_store import read_cache
from stoop.ops.library import register


@dataclass(frozen=True)
class HostPlanMetadata:
    query_start_loc: Tensor  # [num_reqs + 1] int32
    context_lens: Tensor  # [num_reqs] int32
    seq_lens: Tensor  # [num_reqs] int32
    page_indptr: Tensor  # [num_reqs + 1] int32: where each request's pages start
    page_indices: Tensor  # [capacity] int32: the blocks of all requests, then null blocks


class HostPlanBackend:
    name = "hostplan"
    advance = None  # only the host plans

    def __init__(self, setup: AttentionSetup) -> None:
        self.setup = setup
        max_reqs, device = setup.max_reqs, setup.device
        # Attention reads lengths on the host; on a GPU that is a sync, which no graph allows.
        on_cpu = device.type == "cpu"
        self.graph_support = GraphSupport.UNIFORM if on_cpu else GraphSupport.NEVER
        self.page_indptr = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device)
        capacity = max_reqs * setup.slots.block_table.shape[1]
        self.page_indices = torch.zeros(capacity, dtype=torch.int32, device=device)

    def buffers(self) -> dict[str, Tensor]:
        return {"page_indptr": self.page_indptr, "page_indices": self.page_indices}

    def build(self, batch: InputBatch, for_capture: bool = False) -> HostPlanMetadata:
        max_seq_len = self.setup.max_model_len if for_capture else batch.max_seq_len
        self._plan(batch, max_seq_len)
        num_reqs = batch.num_reqs_padded
        return HostPlanMetadata(
            query_start_loc=batch.rows.query_start_loc[: num_reqs + 1],
            context_lens=batch.step.context_lens[:num_reqs],
            seq_lens=batch.step.seq_lens[:num_reqs],
            page_indptr=self.page_indptr[: num_reqs + 1],
            page_indices=self.page_indices,
        )

    def _plan(self, batch: InputBatch, max_seq_len: int) -> None:
        """Write the pages of every row up to its bound, over the whole extent of both buffers."""
        block_size = self.setup.block_size
        bounds = np.minimum(batch.seq_lens_cpu_upper_bound, max_seq_len)
        indptr = np.zeros(self.page_indptr.shape[0], dtype=np.int32)
        indptr[1 : batch.num_reqs + 1] = np.cumsum(-(-bounds // block_size))
        indptr[batch.num_reqs + 1 :] = indptr[batch.num_reqs]
        self.page_indptr.copy_(torch.from_numpy(indptr))
        place = torch.arange(self.page_indices.shape[0], device=self.page_indices.device)
        starts = self.page_indptr.long()
        row = torch.searchsorted(starts[1:], place, right=True).clamp_(max=len(starts) - 2)
        live = place < starts[-1]
        slot = torch.where(live, batch.rows.idx_mapping[row], self.setup.slots.sink)
        page = torch.where(live, place - starts[row], 0)
        blocks = self.setup.slots.block_table[slot, page]
        self.page_indices.copy_(torch.where(live, blocks, 0))

    def forward(
        self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: HostPlanMetadata
    ) -> Tensor:
        out = q.new_empty(q.shape)
        attend_pages(
            q,
            cache,
            metadata.query_start_loc,
            metadata.context_lens,
            metadata.seq_lens,
            metadata.page_indptr,
            metadata.page_indices,
            shape.scale,
            shape.value_scale,
            shape.window or 0,
            out,
        )
        return out


@register(
    "attend_pages(Tensor q, Tensor cache, Tensor query_start_loc, Tensor context_lens, "
    "Tensor seq_lens, Tensor page_indptr, Tensor page_indices, float scale, "
    "float value_scale, int window, Tensor(a!) out) -> ()"
)
def attend_pages(  # noqa: PLR0913
    q: Tensor,
    cache: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    page_indptr: Tensor,
    page_indices: Tensor,
    scale: float,
    value_scale: float,
    window: int,
    out: Tensor,
) -> None:
    """Attend row by row; tokens that belong to no row are padding, and their outputs are zeros."""
    starts, contexts = query_start_loc.tolist(), context_lens.tolist()
    pages = page_indptr.tolist()
    end = 0
    for row, length in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        blocks = page_indices[pages[row] : pages[row + 1]]
        gathered = read_cache(cache, 1, blocks, q.dtype).flatten(1, 2)[:, :length]
        keys, values = gathered.transpose(1, 2)  # [kv_heads, length, head_dim]
        seen = _seen(contexts[row], end - start, length, window, q.device)
        attended = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=seen,
            scale=scale,
            enable_gqa=q.shape[1] != cache.shape[3],
        )
        attended = attended[0].transpose(0, 1)
        out[start:end] = attended if value_scale == 1.0 else attended * value_scale
    out[end:].zero_()


def _seen(context: int, num_queries: int, length: int, window: int, device: torch.device) -> Tensor:
    """The keys that each query after a context sees: [num_queries, length] bool.

    A dead query sees what the last live one does.
    """
    query = torch.arange(context, context + num_queries, device=device).clamp(max=length - 1)
    query = query[:, None]
    key = torch.arange(length, device=device)[None, :]
    seen = key <= query
    return seen & (key > query - window) if window else seen
