"""The server's own options; `stoop serve` has a flag for each."""

import os
from dataclasses import dataclass

from stoop.config.errors import ConfigError
from stoop.server.reasoning import REASONING_PARSERS
from stoop.server.tools import TOOL_PARSERS

API_KEY_VARIABLE = "STOOP_API_KEY"
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What `stoop serve` sets beyond the engine's options. Times are in seconds."""

    model_names: tuple[str, ...] = ("model",)  # the first one is what answers say
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    uds: str | None = None  # path of a Unix socket, instead of host and port
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_queue: int = 1024  # answers that wait, besides the max_num_seqs that run
    max_answers: int = 256  # of one request: prompts times n
    max_body_bytes: int = 16 << 20
    request_timeout: float = 600.0  # 0: none
    drain_timeout: float = 30.0
    keep_alive: float = 10.0  # between comments in a stream that has nothing to send
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None
    log_format: str = "text"
    log_requests: bool = True
    log_prompts: bool = False
    vllm_metric_names: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        _one_of("tool_call_parser", self.tool_call_parser, ("auto", *TOOL_PARSERS))
        if self.reasoning_parser is not None:
            _one_of("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        _one_of("log_format", self.log_format, LOG_FORMATS)
        _at_least("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"--port {self.port}: use 0 to 65535")
        for name in ("max_queue", "request_timeout", "drain_timeout"):
            _at_least(name, getattr(self, name), 0)
        for name in ("max_answers", "max_body_bytes"):
            _at_least(name, getattr(self, name), 1)
        if not all(self.model_names):
            raise ConfigError("--served-model-name is empty: name the model")
        for key in self.api_keys:
            if not key or not key.isascii() or key.strip() != key:
                raise ConfigError("--api-key: use ASCII text without spaces around it")

    @property
    def loopback(self) -> bool:
        return self.uds is not None or self.host in ("127.0.0.1", "localhost", "::1")


def environment_keys() -> tuple[str, ...]:
    """The API keys of the environment, separated by commas."""
    found = os.environ.get(API_KEY_VARIABLE, "")
    return tuple(key for key in found.split(",") if key)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag} {value!r}: use {', '.join(known)}")


def _at_least(name: str, value: float, least: float) -> None:
    if value != value or value < least:
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag} {value:g}: use at least {least}")
