"""How many dimensions of a head a config.json rotates."""

from typing import Any

import pytest

from stoop.config.errors import CheckpointError
from stoop.models.decoder_config import read_decoder_spec

CONFIG: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def rotary_dim(partial_rotary: bool = True, **changes: Any) -> int | None:
    spec = read_decoder_spec(CONFIG | changes, "Some", partial_rotary=partial_rotary)
    assert spec.rotated == (spec.rotary_dim or spec.head_dim)
    return spec.rotary_dim


def test_a_part_of_each_head_is_rotated() -> None:
    assert rotary_dim() is None
    assert rotary_dim(partial_rotary_factor=1.0) is None
    assert rotary_dim(partial_rotary_factor=0.5) == 8
    assert rotary_dim(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}) == 4
    # As in transformers, the inner value counts.
    assert rotary_dim(partial_rotary_factor=0.5, rope_scaling={"partial_rotary_factor": 0.25}) == 4


def test_explicit_factors_are_as_many_as_rotated_pairs() -> None:
    scaling = {"rope_type": "factors", "factors": [1.0] * 4}
    assert rotary_dim(partial_rotary_factor=0.5, rope_scaling=scaling) == 8
    with pytest.raises(CheckpointError, match="4 factors where 8 are needed"):
        rotary_dim(rope_scaling=scaling)


@pytest.mark.parametrize("factor", [0.05, 0.2, 1.5, 1e308])
def test_impossible_parts_are_refused(factor: float) -> None:
    with pytest.raises(CheckpointError, match=r"of 16 dimensions.*fix partial_rotary_factor"):
        rotary_dim(partial_rotary_factor=factor)


@pytest.mark.parametrize("factor", [0, -1.0, "half", [0.5], True])
def test_other_values_are_refused(factor: Any) -> None:
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor.*positive number"):
        rotary_dim(partial_rotary_factor=factor)


@pytest.mark.parametrize("place", [{}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_families_that_rotate_all_refuse_a_part(place: dict[str, Any]) -> None:
    changes = place or {"partial_rotary_factor": 0.5}
    with pytest.raises(CheckpointError, match="other than 1 is not supported"):
        rotary_dim(partial_rotary=False, **changes)
