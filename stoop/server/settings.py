"""The server's own options; `stoop serve` has a flag for each."""

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoop.config.errors import ConfigError
from stoop.server.reasoning import REASONING_PARSERS
from stoop.server.tools import TOOL_PARSERS

API_KEY_VARIABLE = "STOOP_API_KEY"
LOG_FORMATS = ("text", "json")
METRICS_NAMES = ("stoop", "vllm")


LISTENING, LIMITS, ANSWERS, LOGS = "server", "limits", "tools and reasoning", "logs and metrics"


def _flag(default: Any, panel: str, text: str, flag: str | None = None) -> Any:
    """A setting with a flag of `stoop serve`. flag: another than the name says"""
    return field(default=default, metadata={"help": text, "panel": panel, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What `stoop serve` sets beyond the engine's options. Times are in seconds."""

    host: str = _flag(
        "127.0.0.1", LISTENING, "address to listen on; 0.0.0.0 for all, and then set an API key"
    )
    port: int = _flag(8000, LISTENING, "port to listen on; 0 picks a free one")
    uds: str | None = _flag(
        None, LISTENING, "listen on this Unix socket instead of a host and port"
    )
    # The first one is what answers say.
    model_names: tuple[str, ...] = _flag(
        (),
        LISTENING,
        "name of the model in the API; may be repeated; default: the model as given",
        "--served-model-name",
    )
    api_keys: tuple[str, ...] = _flag(
        (),
        LISTENING,
        "key that clients must send as a bearer token; may be repeated; STOOP_API_KEY holds more, "
        "separated by commas, and does not show in the list of processes",
        "--api-key",
    )
    allow_origins: tuple[str, ...] = _flag(
        (),
        LISTENING,
        "web origin whose pages may call the API, such as https://example.org; * for all; may be "
        "repeated",
        "--allow-origin",
    )
    allow_hosts: tuple[str, ...] = _flag(
        (),
        LISTENING,
        "another name of this server in the Host header, such as that of a proxy, for a server on "
        "loopback without an API key; * for all; may be repeated",
        "--allow-host",
    )
    max_queue: int = _flag(
        1024,
        LIMITS,
        "answers that may wait besides the --max-num-seqs that run; more get status 429",
    )
    max_answers: int = _flag(256, LIMITS, "most answers of one request: its prompts times n")
    max_body_bytes: int = _flag(
        16 << 20, LIMITS, "largest request body; larger ones get status 413"
    )
    request_timeout: float = _flag(
        600.0, LIMITS, "seconds that one request may take; 0 for no limit"
    )
    drain_timeout: float = _flag(
        30.0, LIMITS, "seconds that open requests get after SIGTERM or Ctrl-C"
    )
    max_restarts: int = _flag(
        3, LIMITS, "times that a dead engine process is restarted in ten minutes"
    )
    stall_timeout: float = _flag(
        600.0,
        LIMITS,
        "seconds without a sign of life after which the engine's process is restarted; 0 for "
        "never. One step must not take longer",
    )
    chat_template: str | None = _flag(
        None, ANSWERS, "file with a Jinja chat template to use instead of the model's own"
    )
    tool_call_parser: str = _flag(
        "auto",
        ANSWERS,
        "format of tool calls: auto (from the chat template), hermes, llama3_json or pythonic",
    )
    reasoning_parser: str | None = _flag(
        None,
        ANSWERS,
        "put <think>...</think> into reasoning_content: think, or vLLM's names deepseek_r1 and "
        "qwen3",
    )
    log_format: str = _flag("text", LOGS, "log lines: text, or json for one object in each line")
    log_requests: bool = _flag(True, LOGS, "write one line per request to standard error")
    log_prompts: bool = _flag(False, LOGS, "put prompts into these lines")
    metrics_names: str = _flag("stoop", LOGS, "names of the metrics at /metrics: stoop or vllm")
    otlp_traces_endpoint: str | None = _flag(
        None, LOGS, "send OpenTelemetry traces here, such as http://localhost:4317"
    )
    keep_alive: float = 10.0  # between comments in a stream that has nothing to send

    def read_chat_template(self) -> str | None:
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"--chat-template {self.chat_template}: {reason}") from None

    def __post_init__(self) -> None:
        self.read_chat_template()
        _one_of("tool_call_parser", self.tool_call_parser, ("auto", *TOOL_PARSERS))
        if self.reasoning_parser is not None:
            _one_of("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        _one_of("log_format", self.log_format, LOG_FORMATS)
        _one_of("metrics_names", self.metrics_names, METRICS_NAMES)
        _at_least("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"--port {self.port}: use 0 to 65535")
        for name in (
            "max_queue",
            "request_timeout",
            "drain_timeout",
            "max_restarts",
            "stall_timeout",
        ):
            _at_least(name, getattr(self, name), 0)
        for name in ("max_answers", "max_body_bytes"):
            _at_least(name, getattr(self, name), 1)
        if not all(self.model_names):
            raise ConfigError("--served-model-name is empty: name the model")
        for key in self.api_keys:
            if not key or not key.isascii() or key.strip() != key:
                raise ConfigError("--api-key: use ASCII text without spaces around it")

        for host in self.allow_hosts:
            if not host or "/" in host or host != host.strip():
                raise ConfigError(
                    f"--allow-host {host!r}: use a name or an address, such as llm.example.org"
                )

    @property
    def loopback(self) -> bool:
        return self.uds is not None or _is_loopback(self.host)

    @property
    def hosts(self) -> frozenset[str] | None:
        """What the Host header may name, without a port; None: anything.

        A page of another site can point its own name at the loopback address, and is then free to
        call a server that takes all names and needs no key.
        """
        if self.api_keys or self.uds is not None or not self.loopback or "*" in self.allow_hosts:
            return None
        given = (self.host, *self.allow_hosts)
        return frozenset(("localhost", "127.0.0.1", "::1", *map(host_name, given)))


def host_name(text: str) -> str:
    """A Host header without its port, and without the brackets of an IPv6 address."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, colon, port = text.rpartition(":")
    return name if colon and ":" not in name and (port.isdigit() or not port) else text


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


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
