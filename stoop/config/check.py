"""Engine options, checked before anything is fetched, imported or loaded."""

import re

from stoop.config.errors import ConfigError
from stoop.config.resolve import resolve
from stoop.config.schema import EngineOptions, ModelSpec
from stoop.config.speculation import parse_speculation

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def check_options(options: EngineOptions) -> None:
    """Refuse options that are wrong for every model and for every device that they allow.

    Runs the same checks as the start of an engine, with a model that allows everything. `resolve`
    repeats them with the real model.
    """
    if not isinstance(options.device, str) or not _DEVICE.fullmatch(options.device):
        raise ConfigError(f"device={options.device!r}: use auto, cpu, cuda or cuda:N")
    parse_speculation(options.speculative_config)
    devices = ("cpu", "cuda:0") if options.device == "auto" else (options.device,)
    refusals = []
    for device in devices:
        try:
            resolve(options, _permissive_model(options), "", device)
            return
        except ConfigError as error:
            refusals.append(error)
    raise refusals[0]


def _permissive_model(options: EngineOptions) -> ModelSpec:
    """A model with exactly as many positions as were asked for."""
    return ModelSpec(
        architecture="",
        vocab_size=1,
        hidden_size=1,
        num_layers=1,
        max_position=1 if options.max_model_len is None else options.max_model_len,
        dtype="float32",
    )
