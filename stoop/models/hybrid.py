"""What hybrid families share: decoders in which some layers are recurrent instead of attention."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from stoop.config.errors import CheckpointError
from stoop.config.values import is_number, is_whole, shown
from stoop.layers.recurrent import Mamba2Shape
from stoop.model_state.base import ModelState, ModelStateSetup
from stoop.model_state.mamba_hybrid import MambaHybridModelState
from stoop.models.config_reader import MAX_SIZE, Reader, with_defaults
from stoop.models.decoder import DecoderModel, DecoderSpec

ATTENTION, MAMBA = "full_attention", "linear_attention"  # as transformers 5 names them


class HybridModel(DecoderModel):
    """A decoder whose recurrent layers keep their state by slot."""

    def make_model_state(self, setup: ModelStateSetup) -> ModelState:
        return MambaHybridModelState(setup)


@dataclass(frozen=True, kw_only=True)
class MambaHybridSpec(DecoderSpec):
    """Attention and Mamba-2 by turns."""

    layer_types: tuple[str, ...]  # ATTENTION or MAMBA
    mamba: Mamba2Shape


def read_layer_types(
    config: dict[str, Any], known: Collection[str], aliases: Mapping[str, str] | None = None
) -> tuple[str, ...] | None:
    """The kind of each layer; None if the config does not list them.

    aliases: other spellings of the known kinds
    """
    given = config.get("layer_types")
    if given is None:
        return None
    count = config.get("num_hidden_layers")
    if not isinstance(given, list) or len(given) != count:
        found = len(given) if isinstance(given, list) else shown(given)
        raise CheckpointError(
            f"config.json has {found} layer_types for {shown(count)} layers: fix the config or "
            "fetch it again"
        )
    spelled = {kind: kind for kind in known} | dict(aliases or {})
    for kind in given:
        if not isinstance(kind, str) or kind not in spelled:
            raise CheckpointError(
                f"config.json has {shown(kind)} among its layer_types: use a model with only "
                f"{' and '.join(known)}"
            )
    return tuple(spelled[kind] for kind in given)


def read_layer_indices(config: dict[str, Any], key: str) -> set[int] | None:
    """The layers that a config lists by their numbers; None if it does not."""
    given = config.get(key)
    if given is None:
        return None
    count = config.get("num_hidden_layers", 0)
    if not isinstance(given, list) or not all(is_whole(e) and 0 <= e < count for e in given):
        raise CheckpointError(
            f"config.json has {key}={shown(given)} where a list of layers is needed: fix the "
            "config or fetch it again"
        )
    return set(given)


def read_mamba(config: dict[str, Any], hidden_size: int, eps: float) -> Mamba2Shape:
    """The mixer that Bamba and Granite share. What a config lacks is what transformers assumes."""
    reader = Reader(with_defaults(config, {"mamba_conv_bias": True}))
    num_heads = reader.whole("mamba_n_heads", default=128)
    inner_size = reader.whole("mamba_expand", default=2) * hidden_size
    if inner_size % num_heads:
        raise CheckpointError(
            f"config.json has mamba_n_heads={num_heads}, which do not divide the {inner_size} "
            "values of mamba_expand * hidden_size: fix the config"
        )
    head_dim = inner_size // num_heads
    given = config.get("mamba_d_head")
    if given not in (None, "auto") and reader.whole("mamba_d_head") != head_dim:
        raise CheckpointError(
            f"config.json has {num_heads} mamba heads of {shown(given)} values where mamba_expand "
            f"* hidden_size is {inner_size}: fix the config"
        )
    num_groups = reader.whole("mamba_n_groups", default=1)
    if num_heads % num_groups:
        raise CheckpointError(
            f"config.json has {num_heads} mamba heads, which {num_groups} groups do not divide: "
            "fix the config"
        )
    state_size = reader.whole("mamba_d_state", default=256)
    conv_width = reader.whole("mamba_d_conv", default=4)
    if max(inner_size + 2 * num_groups * state_size, conv_width * inner_size) > MAX_SIZE:
        raise CheckpointError(
            f"config.json has mamba layers of {inner_size} values, {num_groups} groups of "
            f"{state_size} and a convolution of {conv_width}, more than stoop supports: fix the "
            "config or fetch it again"
        )
    dt_min, dt_max = _time_step_limit(config)
    return Mamba2Shape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=state_size,
        num_groups=num_groups,
        conv_width=conv_width,
        eps=eps,
        conv_bias=reader.flag("mamba_conv_bias"),
        proj_bias=reader.flag("mamba_proj_bias"),
        dt_min=dt_min,
        dt_max=dt_max,
    )


def _time_step_limit(config: dict[str, Any]) -> tuple[float, float]:
    """The least and the largest time step; none by default.

    transformers limits the time step in passes over several tokens, but not over a single one.
    Here it is limited in both, so that a text's chunks do not change its answer.
    """
    given = config.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    limits = [_limit(each) for each in given] if isinstance(given, list) else []
    if len(limits) == 2 and 0 <= limits[0] <= limits[1] and limits[0] < math.inf:
        return limits[0], limits[1]
    raise CheckpointError(
        f"config.json has time_step_limit={shown(given)} where two rising numbers are needed: fix "
        "the config or fetch it again"
    )


def _limit(value: object) -> float:
    """NaN, which compares with nothing, if it is no number."""
    if value == {"__float__": "Infinity"}:  # as transformers writes it, for JSON has no infinity
        return math.inf
    try:
        return float(value) if is_number(value) else math.nan
    except OverflowError:  # an integer with hundreds of digits
        return math.nan
