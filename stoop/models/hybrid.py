"""What hybrid families share: decoders in which some layers are recurrent instead of attention."""

from collections.abc import Sequence
from typing import Any

from stoop.config.errors import CheckpointError
from stoop.config.values import shown
from stoop.model_state.base import ModelState, ModelStateSetup
from stoop.model_state.mamba_hybrid import MambaHybridModelState
from stoop.models.decoder import DecoderModel


class HybridModel(DecoderModel):
    """A decoder whose recurrent layers keep their state by slot."""

    def make_model_state(self, setup: ModelStateSetup) -> ModelState:
        return MambaHybridModelState(setup)


def read_layer_types(config: dict[str, Any], known: Sequence[str]) -> tuple[str, ...] | None:
    """The kind of each layer; None if the config does not list them."""
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
    for kind in given:
        if kind not in known:
            raise CheckpointError(
                f"config.json has {shown(kind)} among its layer_types: use a model with only "
                f"{' and '.join(known)}"
            )
    return tuple(given)
