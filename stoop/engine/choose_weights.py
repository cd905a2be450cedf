"""Chooses whether the weights of a GGUF file stay quantised."""

import logging

from stoop.checkpoint.fetch import can_pack
from stoop.config.errors import ConfigError
from stoop.config.schema import EngineOptions
from stoop.core.report import Report
from stoop.ops.native.library import find_native, native_problem

log = logging.getLogger(__name__)


def choose_packed(options: EngineOptions, device: str, report: Report | None) -> bool:
    """Whether weights are packed: as asked, or, with "auto", wherever they can be."""
    asked, problem = options.weights == "packed", _conflict(options, device)
    if problem is None and find_native(report) is None:
        problem = f"it needs stoop's CPU kernels, and {native_problem()}"
        if not asked and options.activation_bits == 16:
            log.warning(
                "the weights of %s are dequantised, which takes more memory and time: CPU kernels "
                "would keep them as they are, but %s",
                options.model,
                native_problem(),
            )
    if problem is not None and asked:
        raise ConfigError(f"weights=packed: {problem}; use weights=auto or weights=dense")
    if problem is not None and options.activation_bits != 16:
        raise ConfigError(
            f"activation_bits={options.activation_bits} is for weights that stay quantised: "
            f"{problem}; leave it out"
        )
    return problem is None


def _conflict(options: EngineOptions, device: str) -> str | None:
    """Why these options rule packed weights out, as a clause."""
    if options.weights == "dense":
        return "weights=dense dequantises them"
    if device != "cpu":
        return f"it is for CPUs, and the device is {device}"
    for name in ("dtype", "weight_dtype"):
        if getattr(options, name) not in ("auto", "float32"):
            return f"it computes in float32, and {name} is {getattr(options, name)}"
    if options.load_format == "dummy":
        return "dummy weights are not quantised"
    if not can_pack(options.model):
        return (
            f"{options.model} is not a GGUF file whose matrices are of the types Q4_0, Q4_1, Q8_0, "
            "Q4_K or Q6_K"
        )
    return None
