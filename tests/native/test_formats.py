"""Packed formats hold the blocks of GGUF without loss."""

import numpy as np
import pytest
import torch

from stoop.core.quantized import BLOCKS, QuantizedRows
from stoop.ops import packed
from stoop.ops.native.library import Native
from stoop.ops.packed import FORMATS, WIDE, Groups, common_format, round_to_8_bits, take_apart
from support.packed_models import EVERY_FORMAT, KINDS, dequantized, make_matrix, random_rows

SEEDS = range(3)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_read_as_gguf_reads_them(kind: str, extreme: bool) -> None:
    rows = random_rows(kind, 48, 512, np.random.default_rng(1), extreme)
    ours = take_apart(QuantizedRows(kind, torch.from_numpy(rows))).to_float()
    theirs = dequantized(kind, rows)
    assert torch.equal(ours, theirs) and theirs.any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_of_rows(kind: str) -> None:
    rows = random_rows(kind, 3, 512, np.random.default_rng(1))
    assert QuantizedRows(kind, torch.from_numpy(rows)).shape == (3, 512)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packing_is_undone_to_the_bit(kind: str, extreme: bool) -> None:
    scheme = FORMATS[kind]
    rows = random_rows(kind, 48, 512, np.random.default_rng(2), extreme)
    groups = take_apart(QuantizedRows(kind, torch.from_numpy(rows)))
    weight = scheme.empty(48, 512, torch.float32)
    weight.data.copy_(scheme.pack(groups))
    back = scheme.unpack(weight)
    assert torch.equal(back.codes, groups.codes)
    pairs = [(back.scales, groups.scales), (back.minima, groups.minima)]
    for ours, theirs in pairs[: 2 if scheme.has_minima else 1]:
        assert ours is not None and theirs is not None
        bits = torch.int16 if scheme.scale_dtype == torch.float16 else torch.int32
        same_type = theirs.to(scheme.scale_dtype).contiguous()
        assert torch.equal(ours.contiguous().view(bits), same_type.view(bits))


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("kinds", EVERY_FORMAT, ids="+".join)
def test_a_matrix_of_one_or_several_kinds_is_what_gguf_reads(
    kinds: list[str], extreme: bool
) -> None:
    matrix = make_matrix(kinds, 32, 256, seed=3, extreme=extreme)
    assert torch.equal(matrix.scheme.dequantize(matrix.weight), matrix.dense)
    assert (matrix.scheme is WIDE) == (len(kinds) > 1)


@pytest.mark.parametrize("kinds", EVERY_FORMAT, ids="+".join)
def test_rows_taken_from_a_matrix_are_its_rows(
    kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some at a time, in any order, from any tile."""
    monkeypatch.setattr(packed, "TAKEN_AT_ONCE", 32)
    matrix = make_matrix(kinds, 32, 256, seed=4)
    rows = torch.randperm(matrix.dense.shape[0], generator=torch.Generator().manual_seed(1))[:48]
    if len(rows) < 48:
        rows = torch.cat((rows, rows[: 48 - len(rows)]))
    taken = matrix.scheme.take(matrix.weight, rows)
    assert taken.scheme is matrix.scheme and matrix.scheme.shape(taken) == (48, 256)
    assert torch.equal(matrix.scheme.dequantize(taken), matrix.dense[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_draft_head_are_rounded_to_8_bits(kind: str) -> None:
    """Whatever a head's file has: with minima, or with groups of another size."""
    raw = random_rows(kind, 32, 256, np.random.default_rng(2))
    rows = QuantizedRows(kind, torch.from_numpy(raw))
    weight = packed.Q8_0.empty(32, 256, torch.float32)
    packed.Q8_0.store(weight, rows)
    exact = dequantized(kind, raw)
    step = exact.unflatten(1, (-1, 32)).abs().amax(dim=-1, keepdim=True) / 127
    error = (packed.Q8_0.dequantize(weight) - exact).unflatten(1, (-1, 32)).abs()
    assert bool((error <= 0.56 * step).all())


def test_formats_of_matrices_that_are_stacked() -> None:
    assert common_format(["Q4_0", "Q4_0"]) is packed.Q4_0
    assert common_format(["Q4_0", "Q6_K", "Q4_0"]) is WIDE
    assert common_format([]) is None
    assert common_format(["Q4_0", ""]) is None
    assert common_format(["Q5_K"]) is None


def test_sizes_that_fit() -> None:
    assert packed.Q4_0.fits([16, 32], 32)
    assert not packed.Q4_0.fits([16, 24], 32)
    assert not packed.Q4_0.fits([16], 48)


def test_groups_have_the_size_that_the_kernels_read(native: Native) -> None:
    for scheme in (*FORMATS.values(), WIDE):
        assert native.group_bytes(scheme.number) == scheme.group_bytes, scheme


def test_blocks_of_every_format_are_known_to_gguf() -> None:
    import gguf

    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == sizes


def test_dense_values_are_rounded_to_8_bits() -> None:
    """The error is at most half a step; zeros and the largest value of a group stay."""
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    values[3, :32] = 0
    groups = round_to_8_bits(values)
    error = (groups.to_float() - values).abs().view(16, 2, 32)
    # Half a step, and the rounding of the scale to 11 bits times the code
    steps = groups.scales.float()[..., None]
    assert bool((error <= steps * (0.5 + 127 * 2**-11) + 1e-9).all())
    assert not groups.to_float()[3, :32].any()
    assert int(groups.codes.abs().max()) <= 127


def test_only_8_bits_take_dense_values() -> None:
    weight = packed.Q8_0.empty(16, 32, torch.float32)
    packed.Q8_0.store(weight, torch.ones(16, 32))
    assert torch.allclose(packed.Q8_0.dequantize(weight), torch.ones(16, 32), atol=1e-3)
    with pytest.raises(AssertionError, match="other values are packed as Q8_0"):
        packed.Q4_0.store(packed.Q4_0.empty(16, 32, torch.float32), torch.ones(16, 32))


# ---- mutants ----


def test_the_scale_of_the_neighbouring_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packed.Packed.pack

    def shifted(self: packed.Packed, groups: Groups) -> torch.Tensor:
        return pack(self, Groups(groups.codes, groups.scales.roll(1, dims=1), groups.minima))

    monkeypatch.setattr(packed.Packed, "pack", shifted)
    for kinds in EVERY_FORMAT:
        matrix = make_matrix(kinds, 32, 256)
        assert not torch.equal(matrix.scheme.dequantize(matrix.weight), matrix.dense), kinds


def test_a_lost_minimum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packed.Packed.pack

    def without(self: packed.Packed, groups: Groups) -> torch.Tensor:
        none = None if groups.minima is None else torch.zeros_like(groups.minima)
        return pack(self, Groups(groups.codes, groups.scales, none))

    monkeypatch.setattr(packed.Packed, "pack", without)
    for kinds in (["Q4_1"], ["Q4_K"], ["Q4_0", "Q4_1"]):
        matrix = make_matrix(kinds, 32, 256)
        assert not torch.equal(matrix.scheme.dequantize(matrix.weight), matrix.dense), kinds
