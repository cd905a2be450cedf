"""Results of every CPU kernel, to be compared between instruction sets."""

import torch
from torch import Tensor

from stoop.ops.native.calls import BatchRows, native_attend
from support.attention_cases import Heads, Row, make_case
from support.packed_models import EVERY_FORMAT, make_matrix


def compute() -> list[Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    values = []
    for kinds in EVERY_FORMAT:
        matrix = make_matrix(kinds, 32, 256)
        x, norm = torch.randn(9, 256), 1 + 0.1 * torch.randn(256)
        ids = torch.arange(matrix.dense.shape[0])
        values += [
            matrix.scheme.embed(ids, matrix.weight, torch.float32),
            matrix.scheme.linear(x, matrix.weight, None),
            matrix.scheme.norm_linear_silu(x, norm, 1e-5, matrix.weight, None),
        ]
    for size in (16, 80, 128):
        case = make_case([Row(70, 1), Row(0, 40), Row(130, 3)], Heads(2, 2, size))
        out = torch.empty(case.q.shape)
        lengths = (case.query_start_loc, case.context_lens, case.seq_lens)
        rows = BatchRows(*lengths, case.row_slots, case.block_table)
        native_attend(case.q, case.cache, list(rows), size**-0.5, 24, out)
        values.append(out)
    return values
