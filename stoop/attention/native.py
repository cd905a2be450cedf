"""Attention on a CPU by our own kernel, which reads the paged cache in place.

Each query is computed by itself, over keys in order: its output does not depend on what else is in
the batch. Lengths are read when the kernel runs, so a captured graph serves any lengths.
"""

from torch import Tensor

from stoop.attention.base import AttentionSetup, AttentionShape
from stoop.batch.input_batch import InputBatch
from stoop.config.errors import ConfigError
from stoop.graph.support import GraphSupport
from stoop.ops.native.calls import BatchRows, native_attend
from stoop.ops.native.library import find_native, native_problem


class NativeBackend:
    name = "native"
    graph_support = GraphSupport.ALWAYS

    def __init__(self, setup: AttentionSetup) -> None:
        if find_native() is None:
            raise ConfigError(
                f"attention_backend=native needs stoop's CPU kernels, and {native_problem()}: "
                "use attention_backend=auto"
            )
        self.block_table = setup.slots.block_table

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def build(self, batch: InputBatch, for_capture: bool = False) -> BatchRows:
        num_reqs = batch.num_reqs_padded
        return BatchRows(
            query_start_loc=batch.rows.query_start_loc[: num_reqs + 1],
            context_lens=batch.step.context_lens[:num_reqs],
            seq_lens=batch.step.seq_lens[:num_reqs],
            row_slots=batch.row_slots,
            block_table=self.block_table,
        )

    def advance(self, metadata: BatchRows) -> None:
        """Nothing to do: all that it reads is read when it runs."""

    def forward(
        self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: BatchRows
    ) -> Tensor:
        out = q.new_empty(q.shape)
        native_attend(q, cache, list(metadata), shape.scale, shape.window or 0, out)
        return out
