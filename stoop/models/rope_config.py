"""Reads the rotary settings of a `config.json`.

Reads the layout of transformers 4 (`rope_theta`, `rope_scaling`) and of 5 (`rope_parameters`).
"""

import math
from typing import Any

from stoop.config.errors import CheckpointError
from stoop.config.values import shown
from stoop.layers.rope import RopeSpec
from stoop.models.config_reader import MAX_SIZE, Reader, as_number

_ROPE_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)


def read_rotary_dim(config: dict[str, Any], head_dim: int, partial: bool) -> int | None:
    """The dimensions of a head that are rotated, the first ones; None for all of them.

    partial: whether the family may leave some as they are
    """
    given = [each.get("partial_rotary_factor") for each in (_scaling(config), config)]
    factors = [factor for factor in given if factor is not None]
    if not partial and any(factor != 1.0 for factor in factors):
        raise CheckpointError(
            "partial_rotary_factor other than 1 is not supported: use another model"
        )
    factor = as_number("partial_rotary_factor", factors[0]) if factors else 1.0
    rotary_dim = int(min(factor, 2.0) * head_dim)  # an absurd factor would overflow
    if rotary_dim > head_dim or rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"config.json rotates {rotary_dim} of {head_dim} dimensions of a head, where an even "
            f"number from 2 to {head_dim} is needed: fix partial_rotary_factor"
        )
    return None if rotary_dim == head_dim else rotary_dim


def _scaling(config: dict[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(
            f"config.json has rope scaling {shown(scaling)} where an object is needed: fix the "
            "config"
        )
    return scaling


def read_rope(config: dict[str, Any], max_position: int, rotary_dim: int) -> RopeSpec:
    """rotary_dim: the dimensions of a head that are rotated"""
    scaling = _scaling(config)
    numbers = {k: as_number(k, scaling[k]) for k in _ROPE_NUMBERS if scaling.get(k) is not None}
    theta = as_number(
        "rope_theta", scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    original = _original_positions(scaling, config, max_position)
    try:
        if kind == "default":
            return RopeSpec(theta)
        if kind == "linear":
            return RopeSpec(theta, "linear", factor=numbers["factor"])
        if kind == "llama3":
            return RopeSpec(
                theta,
                "llama3",
                factor=numbers["factor"],
                original_max_position=original,
                low_freq_factor=numbers["low_freq_factor"],
                high_freq_factor=numbers["high_freq_factor"],
            )
        if kind == "yarn":
            return _yarn(theta, scaling, numbers, original, max_position)
        if kind == "factors":
            return RopeSpec(theta, "factors", factors=_factors(scaling["factors"], rotary_dim // 2))
    except KeyError as error:
        raise CheckpointError(
            f"config.json lacks {error.args[0]!r} for its {kind} rope scaling: fix the config"
        ) from None
    raise CheckpointError(
        f"rope scaling {shown(kind)} is not supported: use a model with default, linear, llama3 or "
        "yarn scaling"
    )


def _original_positions(scaling: dict[str, Any], config: dict[str, Any], max_position: int) -> int:
    """The positions that the model was trained on, before its rotary embedding was stretched."""
    key = "original_max_position_embeddings"
    value = scaling.get(key) or config.get(key)
    return max(1, min(int(as_number(key, value)), MAX_SIZE)) if value else max_position


def _factors(given: Any, count: int) -> tuple[float, ...]:
    factors = given if isinstance(given, list) else [given]
    if len(factors) != count:
        raise CheckpointError(
            f"rope_scaling has {len(factors)} factors where {count} are needed: fix the config"
        )
    return tuple(as_number("factors", value) for value in factors)


def _yarn(
    theta: float,
    scaling: dict[str, Any],
    numbers: dict[str, float],
    original: int,
    max_position: int,
) -> RopeSpec:
    factor = numbers.get("factor", max_position / original)
    attention_factor = numbers.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _mscale(factor, as_number("mscale", mscale)) / _mscale(
                factor, as_number("mscale_all_dim", all_dim)
            )
        else:
            attention_factor = _mscale(factor, 1.0)
    truncate = scaling.get("truncate")
    return RopeSpec(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=numbers.get("beta_fast", 32.0),
        beta_slow=numbers.get("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=truncate is None or Reader(scaling).flag("truncate"),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def reach(rope: RopeSpec, max_position: int) -> int:
    """The positions that the model can serve; a stretched model may state its old limit."""
    stretched = rope.original_max_position * rope.factor if rope.kind == "yarn" else 0
    if stretched > MAX_SIZE:
        raise CheckpointError(
            f"config.json stretches {rope.original_max_position} positions by {rope.factor:g}, to "
            f"more than the {MAX_SIZE} that stoop supports: fix the config or fetch it again"
        )
    return max(max_position, int(stretched))
