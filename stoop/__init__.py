"""stoop: an LLM inference engine, exact, fast and readable."""

from typing import TYPE_CHECKING, Any

import stoop.attention.traits  # noqa: F401 - our backends declare themselves to the configuration
from stoop.config.errors import (
    CheckpointError,
    ConfigError,
    FetchError,
    MissingError,
    RequestError,
    StoopError,
)
from stoop.config.options import EngineArgs
from stoop.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from stoop.core.prompts import TextPrompt, TokensPrompt
from stoop.core.sampling_params import SamplingParams
from stoop.version import __version__

if TYPE_CHECKING:
    from stoop.llm import LLM
    from stoop.models.registry import register_model

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "FetchError",
    "Logprob",
    "MissingError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StoopError",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "register_model",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """These bring torch, so they are imported when first asked for."""
    if name == "LLM":
        from stoop.llm import LLM

        return LLM
    if name == "register_model":
        from stoop.models.registry import register_model

        return register_model
    raise AttributeError(f"module 'stoop' has no attribute {name!r}")
