"""Attention by FlashInfer, planned on the host.

A plan splits the batch into work for the SMs. Kernels read the plan and each request's pages from
buffers with fixed addresses, so after planning again a captured graph serves other lengths.
FlashInfer assumes that queries are the last of their row's keys, so with several queries per row a
plan needs exact contexts. The host knows them only while no step is in flight, hence no
`run_ahead`. With no step in flight, no plan is rewritten while it is copied, either. (Draft decodes
may still run while those of the next step are planned: planning again starts with a copy that waits
for the stream.)

Draft decodes have lengths that only the device knows, and one query per row. Their plan is made for
upper bounds. That of a graph is kept until a row needs another number of pages; eager draft decodes
are planned every time. Kernels take the number of keys from `last_page_len`, so before each draft
decode the device writes the true lengths there; a split of the plan past a row's last key finds no
keys and adds nothing. `check_device_lengths` tests that the installed library does this.

Dead query tokens have keys like the others. No live query sees those, but their values are read and
multiplied by 0, so they must not be NaN: neither in memory that was never written
(worker/memory.py zeroes it) nor in blocks that another request had (worker/new_blocks.py).
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoop.attention.base import AttentionSetup, AttentionShape, refuse_unsupported
from stoop.attention.traits import FLASHINFER
from stoop.batch.input_batch import InputBatch
from stoop.config.errors import ConfigError
from stoop.core.state import NULL_BLOCK
from stoop.graph.support import GraphSupport
from stoop.ops.library import register

MIN_WORKSPACE = 128 * 2**20  # bytes, as FlashInfer recommends
KEYS_AHEAD = 256  # draft decodes are planned for a multiple of this many keys
PROBE_PAGES, PROBE_ERROR = 64, 2e-2  # of `check_device_lengths`
TILES = (16, 64, 128)  # query rows per tile, counting each head of a KV head's group


@dataclass
class DeviceLengths:
    """The lengths of a draft decode, and where kernels read them."""

    seq_lens: Tensor  # [rows] int32: what the device knows
    before_last: Tensor  # [rows] int32: keys in all planned pages of a row but the last
    last_page_len: Tensor  # [rows] int32, written: negative if planned pages have no key
    current: bool = False  # whether the first layer has written them

    def write(self) -> None:
        if not self.current:
            torch.sub(self.seq_lens, self.before_last, out=self.last_page_len)
            self.current = True


@dataclass(frozen=True)
class FlashInferMetadata:
    wrappers: dict[AttentionShape, Any]
    num_tokens: int  # tokens that belong to a row; padding follows them
    buffers: list[Tensor]  # what a graph reads of the plan; empty for eager steps
    lengths: DeviceLengths | None = None  # of draft decodes


@dataclass(frozen=True)
class RowLengths:
    """Lengths of every planned row. A graph's padded rows have queries, and null blocks as keys."""

    queries: np.ndarray  # [rows] int64
    keys: np.ndarray  # [rows] int64, dead ones included
    num_pages: np.ndarray  # [rows] int64
    num_owned: np.ndarray  # [rows] int64: pages in the block table; null blocks follow them


@dataclass(frozen=True)
class PagePlaces:
    """For each place in `page_indices`, its row and the number of its page in that row."""

    row: Tensor  # [pages] int64
    page: Tensor  # [pages] int64


@dataclass
class KnownPages:
    """The pages of the last step with some wrappers, and its plan if that has no lengths in it."""

    num_pages: np.ndarray  # [rows] int64
    places: PagePlaces
    owners: tuple[tuple[int, ...], bytes]  # epochs of requests, and how many blocks each has
    page_indices: Tensor  # [pages] int32: their blocks
    # Of draft decodes in a graph: the values of `_small_buffers`. Such a plan is used again until a
    # row needs another number of pages.
    planned: list[Tensor] | None = None


class FlashInferBackend:
    name = "flashinfer"
    graph_support = GraphSupport.UNIFORM

    def __init__(self, setup: AttentionSetup) -> None:
        refuse_unsupported(FLASHINFER, setup)
        try:
            import flashinfer
        except ImportError as error:
            raise ConfigError(
                f"attention_backend=flashinfer needs the package flashinfer ({error}): "
                "pip install 'stoop[flashinfer]', or use attention_backend=triton"
            ) from error
        self.setup = setup
        self.make_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        if "uniform_q_len" not in inspect.signature(self.make_wrapper.plan).parameters:
            raise ConfigError(
                "attention_backend=flashinfer needs FlashInfer 0.7.2.post1 or newer: "
                "pip install 'stoop[flashinfer]', or use attention_backend=triton"
            )
        self.workspace = self._zeros(_workspace_bytes(setup), torch.uint8)
        # Dead tokens may have positions past the model's limit.
        self.max_pages = -(-(setup.max_model_len + setup.query_len) // setup.block_size)
        self.query_indptr = self._zeros(setup.max_reqs + 1)
        self.page_indptr = self._zeros(setup.max_reqs + 1)
        self.page_indices = self._zeros(setup.max_reqs * self.max_pages)
        self.last_page_len = self._zeros(setup.max_reqs)
        self.before_last = self._zeros(setup.max_reqs)
        self.eager = self._make_wrappers()
        # Wrappers of captured graphs, by requests and query length.
        self.captured: dict[tuple[int, int], dict[AttentionShape, Any]] = {}
        self.known: dict[int, KnownPages] = {}  # by id of wrappers
        if setup.device_lengths:
            check_device_lengths(setup, self.make_wrapper, self.workspace)

    def _zeros(self, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.setup.device)

    def _make_wrappers(self, **options: Any) -> dict[AttentionShape, Any]:
        wrappers = {}
        for shape in self.setup.shapes:
            wrapper = self.make_wrapper(self.workspace, "NHD", backend="fa2", **options)
            wrappers[shape] = wrapper
            _WRAPPERS[id(wrapper)] = wrapper
        return wrappers

    def buffers(self) -> dict[str, Tensor]:
        found = {
            "query_indptr": self.query_indptr,
            "page_indptr": self.page_indptr,
            "page_indices": self.page_indices,
            "last_page_len": self.last_page_len,
        }
        if self.setup.device_lengths:
            found["before_last"] = self.before_last
        return found

    def _buffers_of(self, num_reqs: int) -> list[Tensor]:
        """The part that a graph of this many requests reads."""
        return [
            self.query_indptr[: num_reqs + 1],
            self.page_indptr[: num_reqs + 1],
            self.page_indices[: num_reqs * self.max_pages],
            self.last_page_len[:num_reqs],
        ]

    def build(self, batch: InputBatch, for_capture: bool = False) -> FlashInferMetadata:
        """No bound is captured: a graph launches work for all SMs, and the plan says which of it
        exists."""
        wrappers, lengths = self._graph_wrappers(batch, for_capture), None
        if self.setup.device_lengths:
            seq_lens = batch.step.seq_lens[: batch.num_reqs_padded]
            before_last, last = (
                buffer[: batch.num_reqs_padded] for buffer in (self.before_last, self.last_page_len)
            )
            lengths = DeviceLengths(seq_lens, before_last, last)
        if wrappers is not None:
            self._plan(batch, wrappers, batch.query_len)
            buffers = self._buffers_of(batch.num_reqs_padded)
            return FlashInferMetadata(wrappers, batch.num_tokens_padded, buffers, lengths)
        if batch.num_reqs:
            self._plan(batch, self.eager, None)
        return FlashInferMetadata(self.eager, batch.num_tokens, [], lengths)

    @property
    def advance(self) -> Callable[[FlashInferMetadata], None] | None:
        """Only the host plans, but a plan of draft decodes serves any lengths within its bounds."""
        return _forget_lengths if self.setup.device_lengths else None

    def _graph_wrappers(
        self, batch: InputBatch, for_capture: bool
    ) -> dict[AttentionShape, Any] | None:
        """The wrappers of the graph for a batch of this shape; its eager twin uses them too."""
        num_reqs, query_len = batch.num_reqs_padded, batch.query_len
        if query_len is None or batch.num_tokens_padded != num_reqs * query_len:
            return None
        if for_capture and (num_reqs, query_len) not in self.captured:
            self.captured[num_reqs, query_len] = self._make_graph_wrappers(num_reqs)
        return self.captured.get((num_reqs, query_len))

    def _make_graph_wrappers(self, num_reqs: int) -> dict[AttentionShape, Any]:
        """All graphs share the buffers: each is planned right before it runs."""
        query_indptr, page_indptr, page_indices, last_page_len = self._buffers_of(num_reqs)
        return self._make_wrappers(
            use_cuda_graph=True,
            qo_indptr_buf=query_indptr,
            paged_kv_indptr_buf=page_indptr,
            paged_kv_indices_buf=page_indices,
            paged_kv_last_page_len_buf=last_page_len,
        )

    def _plan(
        self, batch: InputBatch, wrappers: dict[AttentionShape, Any], query_len: int | None
    ) -> None:
        """Plan a step. query_len: of every row of a graph, padded rows included; None if eager"""
        rows = self._lengths(batch, query_len)
        if query_len is not None:
            self.page_indices[: batch.num_reqs_padded * self.max_pages].fill_(NULL_BLOCK)
        known = self._know_pages(rows, batch, wrappers)
        if known.planned is None:
            self._plan_wrappers(rows, known.page_indices, wrappers, query_len)
            if self.setup.device_lengths and query_len is not None:
                known.planned = [each.clone() for each in self._small_buffers()]
            return
        pages = self.page_indices[: known.page_indices.shape[0]]
        torch._foreach_copy_([*self._small_buffers(), pages], [*known.planned, known.page_indices])

    def _know_pages(
        self, rows: RowLengths, batch: InputBatch, wrappers: dict[AttentionShape, Any]
    ) -> KnownPages:
        """The pages of a step: those of the last one, if blocks are the same."""
        owners = tuple(row.epoch for row in batch.plan_rows), rows.num_owned.tobytes()
        known = self.known.get(id(wrappers))
        if known is None or not np.array_equal(known.num_pages, rows.num_pages):
            places, num_owned = self._make_places(rows)
            page_indices = self._find_pages(places, num_owned, batch)
            known = KnownPages(rows.num_pages, places, owners, page_indices)
            self.known[id(wrappers)] = known
        elif known.owners != owners:
            num_owned = torch.from_numpy(rows.num_owned)
            if self.setup.device.type == "cuda":  # a copy from pinned memory waits for nothing
                num_owned = num_owned.pin_memory()
            num_owned = num_owned.to(self.setup.device, non_blocking=True)
            known.page_indices = self._find_pages(known.places, num_owned, batch)
            known.owners = owners
        return known

    def _small_buffers(self) -> list[Tensor]:
        return [self.query_indptr, self.page_indptr, self.last_page_len, self.before_last]

    def _plan_wrappers(
        self,
        rows: RowLengths,
        page_indices: Tensor,
        wrappers: dict[AttentionShape, Any],
        query_len: int | None,
    ) -> None:
        before_last = (rows.num_pages - 1) * self.setup.block_size
        last_page_len = torch.from_numpy((rows.keys - before_last).astype(np.int32))
        if self.setup.device_lengths:
            self.before_last.zero_()
            self.before_last[: len(before_last)] = torch.from_numpy(before_last)
            if query_len is None:  # the wrapper keeps a tensor that is on its device
                self.last_page_len[: len(last_page_len)] = last_page_len
                last_page_len = self.last_page_len[: len(last_page_len)]
        plan = (_indptr(rows.queries), _indptr(rows.num_pages), page_indices, last_page_len)
        for shape, wrapper in wrappers.items():
            _plan_wrapper(wrapper, plan, shape, self.setup, query_len)

    def _lengths(self, batch: InputBatch, query_len: int | None) -> RowLengths:
        queries, block_size = batch.query_lens_cpu, self.setup.block_size
        if query_len is not None:
            assert (queries == query_len).all(), (queries, query_len)
            queries = np.full(batch.num_reqs_padded, query_len)
        bounds = batch.seq_lens_cpu_upper_bound
        keys, num_owned = queries.copy(), np.zeros_like(queries)
        if self.setup.device_lengths:
            keys[: batch.num_reqs] = np.minimum(
                -(-bounds // KEYS_AHEAD) * KEYS_AHEAD, self.max_pages * block_size
            )
        else:
            contexts = np.array([row.num_computed for row in batch.plan_rows], dtype=np.int64)
            keys[: len(contexts)] += contexts  # rows of a dummy run have none
            exact = np.minimum(keys[: batch.num_reqs], self.setup.max_model_len)
            assert (bounds == exact).all(), (bounds, exact)
        num_owned[: batch.num_reqs] = -(-bounds // block_size)
        return RowLengths(queries, keys, -(-keys // block_size), num_owned)

    def _make_places(self, rows: RowLengths) -> tuple[PagePlaces, Tensor]:
        """Also the number of pages that each row owns, on the device."""
        ends = rows.num_pages.cumsum()
        numbers = torch.from_numpy(np.stack((ends - rows.num_pages, ends, rows.num_owned)))
        first, end, num_owned = numbers.to(self.setup.device)
        place = torch.arange(int(ends[-1]), device=self.setup.device)
        row = torch.searchsorted(end, place, right=True)
        return PagePlaces(row, place - first[row]), num_owned

    def _find_pages(self, places: PagePlaces, num_owned: Tensor, batch: InputBatch) -> Tensor:
        """The blocks of all rows, concatenated: [pages] int32."""
        row, page = places.row, places.page
        owned = page < num_owned[row]
        slot = batch.rows.idx_mapping[row]
        blocks = self.setup.slots.block_table[slot, torch.where(owned, page, 0)]
        return torch.where(owned, blocks, NULL_BLOCK)

    def forward(
        self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: FlashInferMetadata
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        end = metadata.num_tokens
        if end < q.shape[0]:
            out[end:].zero_()
        if end:
            if metadata.lengths is not None:
                metadata.lengths.write()
            wrapper = id(metadata.wrappers[shape])
            attend_planned(q[:end], cache, metadata.buffers, wrapper, out[:end])
        return out


def _forget_lengths(metadata: FlashInferMetadata) -> None:
    """Make the next layer write the lengths at that time."""
    assert metadata.lengths is not None
    metadata.lengths.current = False


# An operation cannot take a wrapper, so it takes its id, and finds the wrapper here.
_WRAPPERS: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


@register(
    "attend_planned(Tensor q, Tensor cache, Tensor[] plan, int wrapper, Tensor(a!) out) -> ()"
)
def attend_planned(
    q: Tensor, cache: Tensor, plan: Sequence[Tensor], wrapper: int, out: Tensor
) -> None:
    """Attend by a plan. `plan` lists what the wrapper reads in a graph, for the sanitizer."""
    _WRAPPERS[wrapper].run(q, (cache[0], cache[1]), out=out, enable_pdl=False)


def _indptr(lengths: np.ndarray) -> Tensor:
    """The starts of all rows and the end of the last: [len + 1] int32, on the host."""
    return torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32))


def check_device_lengths(
    setup: AttentionSetup, make_wrapper: Callable[..., Any], workspace: Tensor
) -> None:
    """Refuse a library that does not take lengths shorter than planned from the device."""
    for shape in setup.shapes:
        by_bounds, exact = _probe(setup, shape, make_wrapper, workspace)
        if not torch.allclose(by_bounds, exact, rtol=PROBE_ERROR, atol=PROBE_ERROR):
            raise ConfigError(
                "the installed FlashInfer does not read lengths on the device, which draft decodes "
                "need: pip install 'stoop[flashinfer]', or use attention_backend=triton"
            )


def _probe(
    setup: AttentionSetup,
    shape: AttentionShape,
    make_wrapper: Callable[..., Any],
    workspace: Tensor,
) -> list[Tensor]:
    """What rows of some lengths attend to: planned for more keys than they have, then exactly."""
    block_size, device = setup.block_size, setup.device
    bound = PROBE_PAGES * block_size
    lengths = np.array([bound - block_size - 1, bound // 2, 1])
    random = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random).to(device, setup.dtype)

    cache = draw(2, PROBE_PAGES, block_size, shape.num_kv_heads, shape.head_dim)
    q = draw(len(lengths), shape.num_heads, shape.head_dim)
    found = []
    for planned in (np.full_like(lengths, bound), lengths):
        num_pages = -(-planned // block_size)
        pages = np.concatenate([np.arange(count, dtype=np.int32) for count in num_pages])
        before_last = (num_pages - 1) * block_size
        last_page_len = torch.from_numpy((planned - before_last).astype(np.int32)).to(device)
        plan = _indptr(np.ones_like(planned)), _indptr(num_pages), torch.from_numpy(pages)
        wrapper = make_wrapper(workspace, "NHD", backend="fa2")
        on_device = (*(each.to(device) for each in plan), last_page_len)
        _plan_wrapper(wrapper, on_device, shape, setup, query_len=1)
        last_page_len.copy_(torch.from_numpy(lengths - before_last))
        out = torch.empty_like(q)
        wrapper.run(q, (cache[0], cache[1]), out=out, enable_pdl=False)
        found.append(out)
    return found


def _plan_wrapper(
    wrapper: Any,
    plan: tuple[Tensor, ...],
    shape: AttentionShape,
    setup: AttentionSetup,
    query_len: int | None,
) -> None:
    wrapper.plan(
        *plan,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        setup.block_size,
        causal=True,
        sm_scale=shape.scale,
        window_left=shape.window - 1 if shape.window else -1,
        q_data_type=setup.dtype,
        kv_data_type=setup.dtype,
        uniform_q_len=query_len,
    )


def _workspace_bytes(setup: AttentionSetup) -> int:
    """Bytes for the partial results of a graph with all requests: float32, in whole tiles."""
    largest = MIN_WORKSPACE
    for shape in setup.shapes:
        num_rows = setup.query_len * shape.num_heads // shape.num_kv_heads
        tile = next((size for size in TILES if num_rows <= size), TILES[-1])
        num_rows = -(-num_rows // tile) * tile * (setup.max_reqs + 1)
        largest = max(largest, 4 * num_rows * shape.num_kv_heads * (shape.head_dim + 1))
    return largest
