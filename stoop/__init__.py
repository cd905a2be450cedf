"""stoop: an LLM inference engine, exact, fast and readable."""

import importlib
from typing import TYPE_CHECKING, Any

import stoop.attention.traits  # noqa: F401 - our backends declare themselves to the configuration
from stoop.config.errors import (
    CheckpointError,
    ConfigError,
    CoreDied,
    FetchError,
    MissingError,
    RequestError,
    RequestLost,
    StoopError,
)
from stoop.config.options import EngineArgs
from stoop.core.deltas import AnswerDelta, RequestDelta
from stoop.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from stoop.core.prompts import TextPrompt, TokensPrompt
from stoop.core.sampling_params import SamplingParams
from stoop.core.structured import StructuredOutputs
from stoop.version import __version__

if TYPE_CHECKING:
    from stoop.async_llm import AsyncLLM
    from stoop.attention.registry import register_backend
    from stoop.llm import LLM
    from stoop.models.registry import register_model
    from stoop.spec.registry import register_drafter

__all__ = [
    "LLM",
    "AnswerDelta",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "CoreDied",
    "EngineArgs",
    "FetchError",
    "Logprob",
    "MissingError",
    "RequestDelta",
    "RequestError",
    "RequestLost",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StoopError",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "register_backend",
    "register_drafter",
    "register_model",
]


def __dir__() -> list[str]:
    return sorted(__all__)


# These bring torch, so they are imported when first asked for.
_LAZY = {
    "AsyncLLM": "stoop.async_llm",
    "LLM": "stoop.llm",
    "register_backend": "stoop.attention.registry",
    "register_drafter": "stoop.spec.registry",
    "register_model": "stoop.models.registry",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'stoop' has no attribute {name!r}")
