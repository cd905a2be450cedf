"""A stand-in for FlashInfer in plain torch: the calls that stoop makes, with its own checks.

A wrapper for graphs reads only its buffers, as FlashInfer's kernels do in a graph, and none of the
other arguments of `plan`. Masked values are multiplied by 0 here too, so a NaN among them shows.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stoop.attention import flashinfer as backend
from stoop.config import backends


def install(patch: pytest.MonkeyPatch) -> None:
    """Makes attention_backend=flashinfer run on a CPU, in any precision and with any heads."""
    patch.setitem(sys.modules, "flashinfer", sys.modules[__name__])
    lenient = replace(
        backend.FLASHINFER,
        devices=("cpu",),
        dtypes=("float64", "float32"),
        head_sizes=tuple(range(1, 257)),
    )
    patch.setattr(backend, "FLASHINFER", lenient)
    patch.setitem(backends._TRAITS, "flashinfer", lenient)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        *,
        backend: str,
    ) -> None:
        assert (kv_layout, backend, float_workspace_buffer.dtype) == ("NHD", "fa2", torch.uint8)
        self.use_cuda_graph = use_cuda_graph
        given = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf)
        self.buffers = [b for b in (*given, paged_kv_last_page_len_buf) if b is not None]
        assert len(self.buffers) == (4 if use_cuda_graph else 0)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        uniform_q_len: int | None,
    ) -> None:
        plan = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert causal and all(tensor.dtype == torch.int32 for tensor in plan)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert 1 <= paged_kv_last_page_len.min() <= paged_kv_last_page_len.max() <= page_size
        if self.use_cuda_graph:
            assert set(qo_indptr.diff().tolist()) == {uniform_q_len}
            for buffer, tensor in zip(self.buffers, plan, strict=True):
                # Only pages may be fewer than the buffer holds.
                assert len(tensor) == len(buffer) or tensor is paged_kv_indices
                buffer[: len(tensor)].copy_(tensor)
        else:
            self.buffers = plan  # what is on the device already is not copied
        self.num_tokens = int(qo_indptr[-1])
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.sm_scale, self.window_left = sm_scale, window_left
        self.dtypes = (q_data_type, kv_data_type)

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor, enable_pdl: bool
    ) -> Tensor:
        keys, values = paged_kv_cache  # [pages, page_size, kv_heads, head_dim] each
        num_heads, num_kv_heads, head_dim, page_size = self.heads
        assert q.shape == out.shape == (self.num_tokens, num_heads, head_dim)
        assert keys.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert (q.dtype, keys.dtype) == self.dtypes
        for start, end, pages, length in self._rows(page_size):
            k, v = (part[pages].flatten(0, 1)[:length] for part in (keys, values))
            k, v = (part.repeat_interleave(num_heads // num_kv_heads, dim=1) for part in (k, v))
            query = torch.arange(length - (end - start), length)[:, None]
            key = torch.arange(length)[None, :]
            seen = key <= query
            if self.window_left >= 0:
                seen &= key >= query - self.window_left
            scores = torch.einsum("qhd,khd->hqk", q[start:end], k) * self.sm_scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, v)
        return out

    def _rows(self, page_size: int) -> Iterator[tuple[int, int, Tensor, int]]:
        """First and last query token of each, its pages and its number of keys."""
        queries, starts, pages, last = self.buffers
        for row, filled in enumerate(last.tolist()):
            assert filled <= page_size, "keys past the last page of a row"
            mine = pages[starts[row] : starts[row + 1]].long()
            length = (len(mine) - 1) * page_size + filled
            yield int(queries[row]), int(queries[row + 1]), mine, length
