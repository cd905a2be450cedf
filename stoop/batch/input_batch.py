"""The persistent buffers that every step reads, and one step's view of them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stoop.core.step import PlannedRow
from stoop.ops.inputs import RowTensors, SlotTensors, StepTensors, prepare_inputs


@dataclass(frozen=True)
class InputBatch:
    """One step's inputs. Tensors are views of buffers whose addresses never change.

    Padded counts are those of the graph that runs the batch; in eager mode there is no padding.
    """

    plan_rows: list[PlannedRow]
    num_reqs: int
    num_tokens: int
    num_reqs_padded: int
    num_tokens_padded: int
    query_lens_cpu: np.ndarray  # [num_reqs] int64, exact
    query_len: int | None  # query length of each row in a decode batch, an upper bound; None: none
    seq_lens_cpu_upper_bound: np.ndarray  # [num_reqs] int64, including dead tokens
    rows: RowTensors  # whole buffers
    step: StepTensors  # whole buffers

    def without_padded_rows(self) -> "InputBatch":
        """Return the batch for phases that run eagerly after a graph of the forward pass."""
        if self.num_reqs_padded == self.num_reqs:
            return self
        return replace(self, num_reqs_padded=self.num_reqs)

    @property
    def num_places(self) -> int:
        """Tokens of a decode, its newest and its drafts; 1 if no row is a decode."""
        return max((row.num_tokens for row in self.plan_rows if row.decodes), default=1)

    @property
    def max_seq_len(self) -> int:
        """The longest sequence of the batch (an upper bound), not the model's limit."""
        return int(self.seq_lens_cpu_upper_bound.max(initial=0))

    @property
    def input_ids(self) -> Tensor:
        return self.step.input_ids[: self.num_tokens_padded]

    @property
    def positions(self) -> Tensor:
        return self.step.positions[: self.num_tokens_padded]

    @property
    def slot_mapping(self) -> Tensor:
        return self.step.slot_mapping[: self.num_tokens_padded]

    @property
    def last_token_indices(self) -> Tensor:
        return self.step.last_token_indices[: self.num_reqs_padded]

    @property
    def row_drafts(self) -> Tensor:
        return self.step.row_drafts[: self.num_reqs_padded]

    @property
    def row_slots(self) -> Tensor:
        return self.step.row_slots[: self.num_reqs_padded]


@dataclass(frozen=True)
class _Loaded:
    """The rows that are in the buffers."""

    places: list[tuple[int, int]]  # slot and number of query tokens of each row
    query_lens: np.ndarray  # [num_reqs] int64
    num_tokens: int
    key: object = None  # of the call that loaded them


class InputBuffers:
    """Owns the buffers, which are allocated once and large enough for any step."""

    def __init__(self, max_reqs: int, max_tokens: int, device: torch.device) -> None:
        self.max_reqs = max_reqs
        self.max_tokens = max_tokens
        self.device = device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.rows = RowTensors(
            idx_mapping=zeros(max_reqs), query_start_loc=zeros(max_reqs + 1, dtype=torch.int32)
        )
        self.step = StepTensors(
            input_ids=zeros(max_tokens, dtype=torch.int32),
            positions=zeros(max_tokens),
            slot_mapping=zeros(max_tokens),
            context_lens=zeros(max_reqs, dtype=torch.int32),
            seq_lens=zeros(max_reqs, dtype=torch.int32),
            last_token_indices=zeros(max_reqs),
            samples=zeros(max_reqs, dtype=torch.int32),
            row_drafts=zeros(max_reqs),
            row_slots=zeros(max_reqs),
        )
        self._loaded: _Loaded | None = None

    def forget_rows(self) -> None:
        """Force the next `load_rows` to copy, since other code has written the rows."""
        self._loaded = None

    def load_rows(
        self,
        rows: list[PlannedRow],
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        query_len: int | None = None,
        key: object = None,
    ) -> InputBatch:
        """Copy a plan's rows into the buffers and pad the rest. Without rows, all is padding.

        key: an object that stands for these slots and numbers of tokens: if the last call had it,
        nothing is compared
        """
        loaded = self._loaded
        if loaded is None or key is None or loaded.key is not key:
            places = [(row.slot, row.num_tokens) for row in rows]
            if loaded is None or loaded.places != places:  # an unchanged batch needs no copy
                self._loaded = None  # in case a copy fails
                loaded = self._copy_rows(places)
            loaded = self._loaded = replace(loaded, key=key)
        num_reqs, num_tokens = len(rows), loaded.num_tokens
        return InputBatch(
            plan_rows=rows,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_reqs_padded=num_reqs if num_reqs_padded is None else num_reqs_padded,
            num_tokens_padded=num_tokens if num_tokens_padded is None else num_tokens_padded,
            query_lens_cpu=loaded.query_lens,
            query_len=query_len,
            seq_lens_cpu_upper_bound=np.array([row.seq_len for row in rows], dtype=np.int64),
            rows=self.rows,
            step=self.step,
        )

    def fill(self, slots: SlotTensors, block_size: int) -> None:
        """Run phase I, which computes the step's inputs on the device."""
        prepare_inputs(slots, self.rows, self.step, block_size)

    def _copy_rows(self, places: list[tuple[int, int]]) -> _Loaded:
        num_reqs = len(places)
        query_lens = np.array([num_tokens for _, num_tokens in places], dtype=np.int64)
        idx_mapping = np.full(self.max_reqs, -1, dtype=np.int64)
        idx_mapping[:num_reqs] = [slot for slot, _ in places]
        starts = np.zeros(self.max_reqs + 1, dtype=np.int32)
        starts[1 : num_reqs + 1] = np.cumsum(query_lens)
        starts[num_reqs + 1 :] = starts[num_reqs]
        assert starts[-1] <= self.max_tokens, (starts[-1], self.max_tokens)
        self._copy_in(self.rows.idx_mapping, idx_mapping)
        self._copy_in(self.rows.query_start_loc, starts)
        return _Loaded(places, query_lens, int(starts[-1]))

    def _copy_in(self, target: Tensor, host: np.ndarray) -> None:
        source = torch.from_numpy(host)
        if self.device.type == "cuda":
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)
