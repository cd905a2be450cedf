"""Sampling options. They are checked when made and when changed, so that none is ignored later."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stoop.config.errors import RequestError
from stoop.config.values import is_number, is_whole, plain, shown, unknown_name
from stoop.config.vllm_names import SAMPLING_ARGS, check_foreign
from stoop.core.structured import StructuredOutputs

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
    """Make the constructor refuse unknown arguments with a sentence that says what to do."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = [f.name for f in dataclasses.fields(cls)]
    positional = [f.name for f in dataclasses.fields(cls) if not f.kw_only]

    @functools.wraps(init)
    def checked_init(self: object, *args: Any, **options: Any) -> None:
        if len(args) > len(positional) or any(name in options for name in positional[: len(args)]):
            raise RequestError("write each option of SamplingParams once, as name=value")
        _check_names({name: options[name] for name in options if name not in known}, known)
        init(self, *args, **{name: options[name] for name in options if name in known})

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


def _check_names(others: dict[str, Any], known: Sequence[str]) -> None:
    """Refuse options that stoop does not have, unless they are vLLM's and change nothing."""
    for name in others:
        if name not in SAMPLING_ARGS:
            raise RequestError(unknown_name("sampling option", name, known))
    refusal = check_foreign(SAMPLING_ARGS, others)
    if refusal is not None:
        raise RequestError(refusal)


@_refuse_unknown
@dataclass
class SamplingParams:
    """How to generate. Names, order and defaults are vLLM's.

    A field may be assigned, and is checked when it is. The engine takes a copy of the parameters
    when a request is made, so a later change affects later requests only.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None  # None or -1: the engine draws one
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as the model has room for
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # -1: the whole vocabulary
    detokenize: bool = field(default=True, kw_only=True)
    skip_special_tokens: bool = field(default=True, kw_only=True)
    include_stop_str_in_output: bool = field(default=False, kw_only=True)
    logit_bias: dict[int, float] | None = field(default=None, kw_only=True)
    bad_words: Sequence[str] = field(default=(), kw_only=True)
    # Draft tokens per step, at most; None: as many as the engine makes; 0: none.
    num_speculative_tokens: int | None = field(default=None, kw_only=True)
    # What the answer must match; a dictionary of the fields of `StructuredOutputs` does, too.
    structured_outputs: StructuredOutputs | None = field(default=None, kw_only=True)

    def __setattr__(self, name: str, value: object) -> None:
        rule = _RULES.get(name)
        if rule is None:
            _check_names({name: value}, list(_RULES))
            return
        object.__setattr__(self, name, rule(name, plain(value)))

    def __post_init__(self) -> None:
        """Check fields that depend on each other. Done again when a request is made."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: lower it"
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True: use stop_token_ids instead")
        if self.structured_outputs is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos=True and structured_outputs disagree: an answer that matches its "
                "grammar ends with the end-of-text token; leave ignore_eos out"
            )
        if self.structured_outputs is not None and self.min_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} and structured_outputs disagree: the grammar "
                "decides when an answer may end; leave min_tokens out"
            )

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
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one, checked once more."""
        return dataclasses.replace(self)

    @staticmethod
    def from_optional(**options: Any) -> "SamplingParams":
        """Leave options of None at their defaults, except for `max_tokens`."""
        unset = {name for name, value in options.items() if value is None and name != "max_tokens"}
        return SamplingParams(**{n: v for n, v in options.items() if n not in unset})


Rule = Callable[[str, Any], Any]


def _whole(low: int, high: int, *, also: dict[Any, int | None] | None = None) -> Rule:
    """An int in [low, high], or one of the values in `also`, which are replaced by others."""

    def check(name: str, value: Any) -> int | None:
        for special, meaning in (also or {}).items():
            if type(value) is type(special) and value == special:
                return meaning
        if not is_whole(value) or not low <= value <= high:
            bounds = f"from {low} to {high}"
            if high == MAX_COUNT and not (is_whole(value) and value > high):
                bounds = f"of at least {low}"
            raise RequestError(f"{name}={shown(value)}: use a whole number {bounds}")
        return int(value)

    return check


def _number(low: float, high: float, *, open_low: bool = False) -> Rule:
    """A number in [low, high]; nan is refused."""

    def check(name: str, value: Any) -> float:
        ok = is_number(value) and low <= value <= high and not (open_low and value == low)
        if not ok:
            bounds = (
                f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
            )
            raise RequestError(f"{name}={shown(value)}: use a number {bounds}")
        return float(value)

    return check


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name}={shown(value)}: use True or False")
    return value


def _texts(limit: int | None) -> Rule:
    """One string or several."""

    def check(name: str, value: Any) -> list[str]:
        texts = [value] if isinstance(value, str) else list(_items(name, value))
        for text in texts:
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name} has {shown(text)}: use strings that are not empty")
        _at_most(name, len(texts), limit)
        return texts

    return check


def _token_ids(name: str, value: Any) -> list[int]:
    check = _whole(0, MAX_COUNT)
    ids = [check(name, plain(token)) for token in _items(name, value)]
    _at_most(name, len(ids), MAX_STOP_IDS)
    return ids


def _biases(name: str, value: Any) -> dict[int, float] | None:
    """Token ids as ints (JSON has string keys) with finite biases."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{name}={shown(value)}: use a dictionary of token id to bias")
    check = _number(-100.0, 100.0)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = plain(key)
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20:
            token = int(token)
        if not is_whole(token):
            raise RequestError(f"{name} has key {shown(key)}: use token ids")
        biases[int(token)] = check(f"{name}[{shown(token)}]", plain(bias))
    _at_most(name, len(biases), MAX_LOGIT_BIAS)
    return biases


def _items(name: str, value: Any) -> Iterator[Any]:
    if value is None:
        return iter(())
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | frozenset | set):
        raise RequestError(f"{name}={shown(value)}: use a list")
    return iter(value)


def _at_most(name: str, found: int, limit: int | None) -> None:
    if limit is not None and found > limit:
        raise RequestError(f"{name} has {found} entries: use at most {limit}")


_RULES: dict[str, Rule] = {
    "n": _whole(1, MAX_N),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.0, 100.0, open_low=True),
    "temperature": _number(0.0, 100.0),
    "top_p": _number(0.0, 1.0, open_low=True),
    "top_k": _whole(0, MAX_COUNT, also={-1: 0}),
    "min_p": _number(0.0, 1.0),
    "seed": _whole(-(2**63), 2**63 - 1, also={None: None, -1: None}),
    "stop": _texts(None),
    "stop_token_ids": _token_ids,
    "ignore_eos": _switch,
    "max_tokens": _whole(1, MAX_COUNT, also={None: None}),
    "min_tokens": _whole(0, MAX_COUNT),
    "logprobs": _whole(0, MAX_LOGPROBS, also={None: None, True: 1}),
    "prompt_logprobs": _whole(0, MAX_LOGPROBS, also={None: None, True: 1, -1: -1}),
    "detokenize": _switch,
    "skip_special_tokens": _switch,
    "include_stop_str_in_output": _switch,
    "logit_bias": _biases,
    "bad_words": _texts(MAX_BAD_WORDS),
    "num_speculative_tokens": _whole(0, MAX_COUNT, also={None: None}),
    "structured_outputs": lambda name, value: StructuredOutputs.of(value),
}
