"""Specs of what layers keep between steps: shapes, dtypes and bytes, no tensors.

A layer declares the state it needs; memory is sized, allocated, checked and counted from that
alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

NULL_BLOCK = 0  # padded rows point at it; it is never handed out and never written
SLOT_ALIGNMENT = 128  # bytes; every tensor of a slot starts at a multiple of it
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to allocate."""

    shape: Shape
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def aligned_bytes(spec: TensorSpec) -> int:
    """The bytes that a tensor takes in a slot."""
    return -(-spec.num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


@dataclass(frozen=True)
class PagedState:
    """Keys and values of every token, in blocks whose ids are the same for all layers.

    The cache is one tensor, [2, num_blocks, block_size, num_heads, key_dim]: keys, then values.
    Latent attention has no values of its own (`value_dim` 0: they are a view of the keys), and its
    first axis is 1.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: str | None = None  # None: that of the engine's KV cache
    window: int | None = None  # a token sees itself and window - 1 before it

    def __post_init__(self) -> None:
        assert self.value_dim in (0, self.key_dim), (self.key_dim, self.value_dim)

    @property
    def token_elements(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)

    def tokens_read(self, context: float) -> float:
        """Tokens that one query reads after a context of this many."""
        return context if self.window is None else min(context, self.window)

    def tensor(self, num_blocks: int, block_size: int, dtype: str) -> TensorSpec:
        parts = 2 if self.value_dim else 1
        shape = (parts, num_blocks, block_size, self.num_heads, self.key_dim)
        return TensorSpec(shape, self.dtype or dtype)


@dataclass(frozen=True)
class RecurrentState:
    """A fixed amount of state for every request slot, however long its text is.

    `tensors` exist once per slot. `per_draft` exist once per token of a decode step, K + 1 per
    slot: a layer stores there what it needs to undo the tokens of rejected drafts.
    """

    tensors: Mapping[str, TensorSpec]
    per_draft: Mapping[str, TensorSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert not self.tensors.keys() & self.per_draft.keys(), "a name means one tensor"

    def slot_tensors(self, query_len: int) -> dict[str, TensorSpec]:
        """The tensors of one slot. query_len: K + 1"""
        logs = {
            name: TensorSpec((query_len, *spec.shape), spec.dtype)
            for name, spec in self.per_draft.items()
        }
        return {**self.tensors, **logs}


State = PagedState | RecurrentState


@dataclass(frozen=True)
class StateLayout:
    """The states of all layers, the target's first and the drafter's after them.

    vLLM: KVCacheConfig.
    """

    states: tuple[State, ...]
    block_size: int
    num_slots: int  # request slots; tensors have one more row, the sink of padded rows
    query_len: int  # K + 1
    dtype: str  # of paged states that do not name one

    @property
    def paged(self) -> list[PagedState]:
        return [state for state in self.states if isinstance(state, PagedState)]

    @property
    def recurrent(self) -> list[RecurrentState]:
        return [state for state in self.states if isinstance(state, RecurrentState)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(state.tensor(1, self.block_size, self.dtype).num_bytes for state in self.paged)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one request slot over all layers: tensor after tensor, each aligned."""
        return sum(
            aligned_bytes(spec)
            for state in self.recurrent
            for spec in state.slot_tensors(self.query_len).values()
        )

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of all slots and the sink."""
        return (self.num_slots + 1) * self.slot_bytes

    def context_bytes(self, context: float, states: Iterable[State] | None = None) -> float:
        """Bytes of state that one decoding request moves after a context of this many tokens: it
        reads its keys and values, and reads and writes its recurrent states.

        states: those of some layers; all by default
        """
        total = 0.0
        for state in self.states if states is None else states:
            if isinstance(state, PagedState):
                size = DTYPE_BYTES[state.dtype or self.dtype]
                total += state.tokens_read(context) * state.token_elements * size
            else:
                total += 2 * sum(spec.num_bytes for spec in state.tensors.values())
        return total
