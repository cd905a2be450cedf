"""Options of `stoop bench serve` in groups: when requests are sent, and what they ask for."""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from stoop.cli.bench.common import parse_sizes
from stoop.cli.options import Command, make_flag, show_flags
from stoop.config.errors import ConfigError

if TYPE_CHECKING:
    from stoop.bench.serve import Load
    from stoop.bench.serve_prompts import Prompts

ENDPOINTS = ("chat", "completions")
RANDOM = ("words", "tokens")
DEFAULT_REQUESTS = 100
DEFAULT_CLIENTS = 8
EXAMPLE = """such as '{"top_k": 20}'"""


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class LoadOptions:
    """When requests are sent."""

    rate: str | None = _option(
        None, "open loop: requests per second; several values, with commas, run in turn"
    )
    concurrency: str | None = _option(
        None,
        "closed loop: clients that each send one request after another; several values, with "
        f"commas, run in turn; default: {DEFAULT_CLIENTS}",
    )
    num_requests: int | None = _option(
        None, f"requests of each load; default: {DEFAULT_REQUESTS}, or as many as --duration gives"
    )
    duration: float | None = _option(
        None, "send requests for this many seconds, then wait for the answers that are open"
    )
    burstiness: float = _option(
        1.0,
        "shape of the gamma distribution of the gaps between requests: 1 gives Poisson arrivals, "
        "less comes in bursts, more is regular",
    )
    warmup: int = _option(4, "requests before the first load that are not measured")
    timeout: float = _option(600.0, "seconds for one request")
    processes: int = _option(1, "spread the client over processes, for very high loads")

    def __post_init__(self) -> None:
        for name in ("num_requests", "processes", "duration", "burstiness", "timeout"):
            check_positive(name, getattr(self, name))
        if self.warmup < 0:
            raise ConfigError(f"--warmup {self.warmup}: use 0 or more")

    def loads(self, seed: int) -> list["Load"]:
        """One load for every rate or number of clients."""
        from stoop.bench.serve import Load

        count = self.num_requests
        if count is None and self.duration is None:
            count = DEFAULT_REQUESTS
        base = Load(
            num_requests=count, duration=self.duration, burstiness=self.burstiness, seed=seed
        )
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError(
                "--rate sends requests at random times and --concurrency one after another: give "
                "one of them"
            )
        if self.rate is not None:
            return [replace(base, rate=rate) for rate in parse_rates(self.rate)]
        if self.burstiness != 1.0:
            raise ConfigError("--burstiness needs --rate: a closed loop has no random arrivals")
        clients = parse_sizes(self.concurrency or str(DEFAULT_CLIENTS), "--concurrency")
        return [replace(base, concurrency=count) for count in clients]


@dataclass(frozen=True)
class PromptOptions:
    """What requests ask for."""

    endpoint: str = _option("chat", "chat or completions")
    questions: Path | None = _option(  # noqa: RUF009
        None, "prompts from a file, in the formats of `stoop bench acceptance`"
    )
    input_len: int = _option(128, "length of random prompts, in words or tokens")
    output_len: int = _option(128, "maximum tokens per answer")
    random: str = _option(
        "words",
        "random prompts of words, most of which are one token, or of tokens: token ids, which need "
        "--endpoint completions",
    )
    vocab_size: int = _option(32000, "random token ids are drawn from the middle half of this many")
    ignore_eos: bool = _option(False, "answers go on after the end-of-text token")
    temperature: float | None = _option(None, "sampling temperature; default: the server's")
    body: str | None = _option(
        None, 'JSON object of more fields for every request, such as {"top_k": 20}'
    )

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "vocab_size"):
            check_positive(name, getattr(self, name))
        for flag, value, known in (
            ("--endpoint", self.endpoint, ENDPOINTS),
            ("--random", self.random, RANDOM),
        ):
            if value not in known:
                raise ConfigError(f"{flag} {value}: use {' or '.join(known)}")
        by_tokens = self.random == "tokens"
        if by_tokens and (self.endpoint == "chat" or self.questions is not None):
            raise ConfigError("--random tokens needs --endpoint completions, and no --questions")

    def prompts(self, model: str, seed: int) -> "Prompts":
        from stoop.bench.serve_prompts import Prompts
        from stoop.text.prompts import read_prompts

        ids = range(self.vocab_size // 4, self.vocab_size * 3 // 4 + 1)
        path = self.questions
        return Prompts(
            model=model,
            chat=self.endpoint == "chat",
            output_len=self.output_len,
            input_len=self.input_len,
            seed=seed,
            token_ids=ids if self.random == "tokens" else None,
            questions=read_prompts(path, "--questions") if path is not None else (),
            extra=self.extra,
        )

    @property
    def extra(self) -> dict[str, Any]:
        """Fields of every request besides its prompt and length."""
        extra: dict[str, Any] = {}
        if self.temperature is not None:
            extra["temperature"] = self.temperature
        if self.ignore_eos:
            extra["ignore_eos"] = True
        return extra if self.body is None else extra | parse_body(self.body)


GROUPS = {"load": LoadOptions, "prompt": PromptOptions}


def serve_flags(command: Command) -> Command:
    """Add a flag for every option; the command gets the groups as `load` and `prompt`."""
    flags, names = [], {}
    for panel, group in GROUPS.items():
        hints = get_type_hints(group)
        names[panel] = [each.name for each in fields(group)]
        for each in fields(group):
            text = each.metadata["help"]
            flag = make_flag(
                each.name, hints[each.name], each.default, text, panel=f"{panel} options"
            )
            flags.append(flag)

    def call(**values: Any) -> None:
        for panel, group in GROUPS.items():
            values[panel] = group(**{name: values.pop(name) for name in names[panel]})
        command(**values)

    return show_flags(command, call, tuple(GROUPS), flags)


def parse_rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < value < float("inf") for value in rates):
        raise ConfigError(f"--rate {text}: use numbers above 0 separated by commas, such as 1,2,4")
    return rates


def parse_body(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--body is not JSON ({error}): use an object, {EXAMPLE}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--body {text}: use an object, {EXAMPLE}")
    if given.get("stream", True) is not True:
        raise ConfigError("--body turns off stream: latencies need streams, so leave it out")
    return given


def check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"--{name.replace('_', '-')} {value}: use a number above 0")
