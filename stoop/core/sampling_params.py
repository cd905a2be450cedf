"""What a user may ask of sampling. Checked when made, so that nothing is dropped later."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stoop.config.errors import RequestError
from stoop.config.resolve import unknown_name

GREEDY_BELOW = 1e-5  # temperatures under this are greedy

# Rows of per-slot device state have fixed widths; a request that needs more is refused.
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 512
MAX_STOP_IDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 16
MAX_N = 128
MAX_COUNT = 2**31 - 1

Params = TypeVar("Params", bound=type)


def _refuse_unknown(cls: Params) -> Params:
    """Make the constructor answer an unknown option with a sentence, not with a TypeError."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = [f.name for f in dataclasses.fields(cls)]

    @functools.wraps(init)
    def checked_init(self: object, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise RequestError(unknown_name("sampling option", name, known))
        init(self, *args, **options)

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


@_refuse_unknown
@dataclass(frozen=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as the model has room for
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # -1: the whole vocabulary
    detokenize: bool = True
    skip_special_tokens: bool = True
    num_speculative_tokens: int | None = None  # drafts a step; None: as the engine does; 0: none

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("stop", "stop_token_ids", "bad_words"):
            put(name, _as_tuple(name, getattr(self, name)))
        if self.top_k == -1:
            put("top_k", 0)
        if self.logit_bias is not None:
            put("logit_bias", _token_keys(self.logit_bias))
        self._check_numbers()
        self._check_lists()
        self._check_switches()

    def _check_numbers(self) -> None:
        _whole("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, 0, MAX_COUNT)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, MAX_COUNT)
        _whole("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.num_speculative_tokens is not None:
            _whole("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: lower it"
            )
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None and self.prompt_logprobs != -1:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name} has {text!r}: use strings that are not empty")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True: use stop_token_ids instead")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, MAX_COUNT)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_IDS)
        _at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        _at_most("logit_bias", len(self.logit_bias or ()), MAX_LOGIT_BIAS)

    def _check_switches(self) -> None:
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r}: use True or False")

    @property
    def wants_scores(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def replace(self, **changes: Any) -> "SamplingParams":
        return dataclasses.replace(self, **changes)


def _as_tuple(name: str, given: Any) -> tuple[Any, ...]:
    """One string or a sequence, as a tuple."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Sequence | frozenset | set):
        raise RequestError(f"{name}={given!r}: use a list")
    return tuple(given)


def _token_keys(bias: dict[Any, Any]) -> dict[int, float]:
    """Token ids as ints (JSON has string keys) with finite biases, or a refusal."""
    if not isinstance(bias, dict):
        raise RequestError(f"logit_bias={bias!r}: use a dictionary of token id to bias")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # JSON has no keys but strings.
        if isinstance(key, str) and key.isdigit():
            key = int(key)
        if not isinstance(key, int) or isinstance(key, bool):
            raise RequestError(f"logit_bias has key {key!r}: use token ids")
        _number(f"logit_bias[{key}]", value, -100.0, 100.0)
        checked[key] = float(value)
    return checked


def _whole(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is not an int in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        bounds = f"of at least {low}" if high == MAX_COUNT else f"from {low} to {high}"
        raise RequestError(f"{name}={value!r}: use a whole number {bounds}")


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    ok = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and low <= value <= high  # false for nan
        and not (open_low and value == low)
    )
    if not ok:
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise RequestError(f"{name}={value!r}: use a number {bounds}")


def _at_most(name: str, found: int, limit: int) -> None:
    if found > limit:
        raise RequestError(f"{name} has {found} entries: use at most {limit}")
