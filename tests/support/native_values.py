"""Results of every CPU kernel, to be compared between instruction sets."""

import torch
from torch import Tensor

from stoop.ops.native.calls import BatchRows, native_attend
from stoop.ops.native.recurrent import run_tokens
from stoop.ops.packed import with_input_bits
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
        coarse = with_input_bits(matrix.scheme, 8)
        values += [
            coarse.linear(x, matrix.weight, None),
            coarse.norm_linear_silu(x, norm, 1e-5, matrix.weight, None),
        ]
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
    for betas in (torch.rand(5, 4), None):
        shape = (4, 32, 48) if betas is not None else (4, 48, 32)
        matrix = torch.randn(shape)
        old, new = _tokens(2), _tokens(5)
        tokens = (new[0], torch.randn(5, 2, 32) / 6, *new[1:])
        found = run_tokens(matrix, old, tokens, betas, fresh=False, logs=False)
        values += [each for each in (*found, matrix) if each is not None]  # Mamba-2: no updates
    return values


def _tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values or updates, and decays."""
    return torch.randn(count, 2, 32) / 6, torch.randn(count, 4, 48), torch.rand(count, 4)
