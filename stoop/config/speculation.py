"""Parses and checks `speculative_config`, key by key."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from stoop.config.errors import ConfigError
from stoop.config.schema import DraftMethod, DraftSampleMethod, HeadSpec, SpecConfig
from stoop.config.values import is_whole, plain, shown

MAX_DRAFTS = 16
AUTO = "auto"
AUTO_DRAFTS = 3  # the most that num_speculative_tokens=auto makes, unless the head's author says so
HEAD_METHODS = get_args(DraftMethod)
_headless = ["ngram"]  # methods that draft without a head
EXAMPLE = '{"method": "eagle3", "model": "path/to/head", "num_speculative_tokens": 3}'


@dataclass(frozen=True)
class SpecOptions:
    """The keys, under vLLM's names; adaptive, draft_vocab_size and draft_vocab are stoop's own."""

    method: str | None = None
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: int | str | None = None  # or "auto"
    adaptive: bool | None = None  # None: for heads on a GPU
    draft_sample_method: str | None = None  # None: coupled, except for n-grams
    rejection_sample_method: str = "standard"
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: Sequence[float] | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_vocab_size: int | str | None = None  # 0 or "full": all tokens
    draft_vocab: str | None = None  # file that `stoop draft-vocab` wrote

    @property
    def drafts_all(self) -> bool:
        """Whether the user asks for the whole vocabulary."""
        return self.draft_vocab_size in (0, "full")


def declare_method(name: str) -> None:
    """Accept a method from outside stoop, which takes num_speculative_tokens and no model."""
    if name in methods():
        raise ConfigError(f"a drafter named {name!r} already exists: use another name")
    _headless.append(name)


def methods() -> tuple[str, ...]:
    return (*HEAD_METHODS, *_headless)


def needs_head(options: SpecOptions) -> bool:
    """Whether a head makes the drafts: the model given, or the one that ships with the target."""
    return options.method not in _headless


def asks_for_auto(given: Any) -> bool:
    """Whether to take the head that ships with the model, if any: see engine/choose_drafter.py."""
    return isinstance(given, str) and given.strip().lower() == "auto"


def parse_speculation(given: str | Mapping[str, Any] | None) -> SpecOptions | None:
    """Parse JSON or a mapping into checked options.

    None and "none" mean no speculation; "auto" gives None too (see `asks_for_auto`).
    """
    if given is None or asks_for_auto(given):
        return None
    if isinstance(given, str) and given.strip().lower() == "none":
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            if given in methods():
                example = f'{{"method": "{given}", "num_speculative_tokens": 3}}'
                raise _refuse(f"is {given}: write it as {example}") from None
            if str(given).isalnum():
                raise _refuse(f"is {given}: use auto, none, or JSON such as {EXAMPLE}") from None
            raise _refuse(f"is not JSON ({error}): write it as {EXAMPLE}") from None
    if not isinstance(given, Mapping):
        raise _refuse(f"is {shown(given)}: write an object such as {EXAMPLE}")
    known = [f.name for f in dataclasses.fields(SpecOptions)]
    for key in given:
        if key not in known:
            names = ", ".join(known)
            raise _refuse(f"has the unknown key {shown(key)}: known are {names}")
    options = SpecOptions(**{key: plain(value) for key, value in given.items()})
    _check(options)
    return options


def fixed_drafts(given: Any) -> dict[str, Any] | None:
    """The same drafter with the most drafts in every step, where their number cannot vary."""
    options = parse_speculation(given)
    if options is None:
        return None
    asked = {k: v for k, v in dataclasses.asdict(options).items() if v is not None}
    if options.num_speculative_tokens == AUTO:
        asked["num_speculative_tokens"] = AUTO_DRAFTS
    return {**asked, "adaptive": False}


def settle_speculation(
    options: SpecOptions,
    head: HeadSpec | None,
    folder: str | None,
    proposed: int | None = None,
    adaptive: bool = False,
) -> SpecConfig:
    """Settle the options.

    head: the one that was found; proposed: its author's number of drafts; adaptive: whether the
    number of drafts varies if the options do not say
    """
    asked = options.num_speculative_tokens
    if asked == AUTO:
        asked, adaptive = min(proposed or AUTO_DRAFTS, MAX_DRAFTS), True
    if options.adaptive is not None:
        adaptive = options.adaptive
    num_drafts = asked or proposed
    if options.num_speculative_tokens is None and (proposed or 0) > MAX_DRAFTS:
        raise _refuse(
            f"lacks num_speculative_tokens (the head's author proposes {proposed}): set it to the "
            f"drafts per step, 1 to {MAX_DRAFTS}"
        )
    if num_drafts is None:
        raise _refuse(
            f"lacks num_speculative_tokens: set it to the drafts per step, 1 to {MAX_DRAFTS}, or "
            "to auto"
        )
    low, high = _lookup_sizes(options)
    return SpecConfig(
        method=head.method if head else str(options.method),
        num_drafts=_whole("num_speculative_tokens", num_drafts, 1, MAX_DRAFTS),
        adaptive=_adaptive(options, adaptive),
        folder=folder,
        head=head,
        draft_sample_method=_draft_sample_method(options, head),
        synthetic_rates=_synthetic_rates(options, int(num_drafts)),
        prompt_lookup_min=low,
        prompt_lookup_max=high,
    )


def _refuse(text: str) -> ConfigError:
    return ConfigError(f"speculative_config {text}")


def _check(options: SpecOptions) -> None:
    """Check each key by itself, and keys that exclude each other."""
    for name, choices in (
        ("method", (*methods(), None)),
        ("draft_sample_method", (*get_args(DraftSampleMethod), None)),
        ("rejection_sample_method", ("standard", "synthetic")),
    ):
        if getattr(options, name) not in choices:
            *others, last = (str(choice) for choice in choices if choice)
            allowed = f"{', '.join(others)} or {last}"
            raise _refuse(f"has {name}={shown(getattr(options, name))}: use {allowed}")
    for name in ("model", "revision", "draft_vocab"):
        if not isinstance(getattr(options, name), str | None):
            raise _refuse(f"has {name}={shown(getattr(options, name))}: use text")
    if not isinstance(options.adaptive, bool | None):
        raise _refuse(f"has adaptive={shown(options.adaptive)}: use true or false")
    if options.num_speculative_tokens == AUTO:
        if options.adaptive is False:
            raise _refuse(
                "has num_speculative_tokens=auto with adaptive=false: give a number of drafts"
            )
    elif options.num_speculative_tokens is not None:
        _whole("num_speculative_tokens", options.num_speculative_tokens, 1, MAX_DRAFTS)
    method, headless = options.method, not needs_head(options)
    if options == SpecOptions():
        raise _refuse(f"is empty: write an object such as {EXAMPLE}")
    if method == "mtp" and (options.model is not None or options.revision is not None):
        raise _refuse(
            "has a model or revision with method mtp, whose head is in the target's own "
            "checkpoint: leave it out"
        )
    if not headless and options.revision is not None and options.model is None:
        raise _refuse("has a revision without a model: name the draft head")
    if headless and (options.model is not None or options.revision is not None):
        raise _refuse(
            f"has a model or revision with method {method}, which takes none: leave it out"
        )
    if headless and options.draft_sample_method not in ("greedy", None):
        raise _refuse(
            f"has draft_sample_method={options.draft_sample_method} with method {method}, which "
            "has no probabilities: leave it out"
        )
    if headless and options.rejection_sample_method != "standard":
        raise _refuse(
            f"has rejection_sample_method=synthetic with method {method}, which may find no "
            "drafts: use a head"
        )
    _check_draft_vocab(options, headless)
    looked_up = (options.prompt_lookup_min, options.prompt_lookup_max) != (None, None)
    if looked_up and method != "ngram":
        raise _refuse("has prompt_lookup_min or _max, which belong to method ngram: leave them out")
    _check_synthetic(options)


def _check_synthetic(options: SpecOptions) -> None:
    synthetic = (options.synthetic_acceptance_length, options.synthetic_acceptance_rates)
    if options.rejection_sample_method == "synthetic" and synthetic.count(None) != 1:
        raise _refuse(
            "has rejection_sample_method=synthetic: give one of synthetic_acceptance_length and "
            "synthetic_acceptance_rates"
        )
    if options.rejection_sample_method == "standard" and synthetic != (None, None):
        raise _refuse(
            "has synthetic acceptance without rejection_sample_method=synthetic: add it, or leave "
            "them out"
        )


def _check_draft_vocab(options: SpecOptions, headless: bool) -> None:
    size = options.draft_vocab_size
    if headless and (size, options.draft_vocab) != (None, None):
        raise _refuse(
            f"has draft_vocab_size or draft_vocab with method {options.method}, which has no head: "
            "leave them out"
        )
    if size is None:
        return
    if size != "full" and (not is_whole(size) or size < 0):
        raise _refuse(
            f'has draft_vocab_size={shown(size)}: use a number of tokens, or "full" for all'
        )
    if options.drafts_all and options.draft_vocab is not None:
        raise _refuse(
            f"has draft_vocab with draft_vocab_size={shown(size)}, which drafts all tokens: leave "
            "out one of them"
        )


def _draft_sample_method(options: SpecOptions, head: HeadSpec | None) -> DraftSampleMethod:
    if options.draft_sample_method is None:
        return "coupled" if head else "greedy"
    return cast(DraftSampleMethod, options.draft_sample_method)


def _adaptive(options: SpecOptions, wanted: bool) -> bool:
    """Where the user leaves it open, drafts whose number matters are all made: drawn ones decide
    which of several texts a seed gives, and synthetic acceptance is to show what K drafts cost."""
    asked = options.adaptive or options.num_speculative_tokens == AUTO
    drawn = options.draft_sample_method == "probabilistic"
    if wanted and asked and drawn:
        raise _refuse(
            "has adaptive drafts with draft_sample_method=probabilistic, whose text would depend "
            "on their number: use coupled or greedy, or a fixed number"
        )
    synthetic = options.rejection_sample_method == "synthetic"
    return wanted and (bool(asked) or not (drawn or synthetic))


def _lookup_sizes(options: SpecOptions) -> tuple[int, int]:
    """prompt_lookup_min and _max: a missing one follows the other; by default 3 and 5."""
    low, high = options.prompt_lookup_min, options.prompt_lookup_max
    for name, value in (("prompt_lookup_min", low), ("prompt_lookup_max", high)):
        if value is not None:
            _whole(name, value, 1, MAX_DRAFTS)
    low = min(3, high or 3) if low is None else low
    high = max(5, low) if high is None else high
    if low > high:
        raise _refuse(f"has prompt_lookup_min={low} above prompt_lookup_max={high}: lower it")
    return low, high


def _synthetic_rates(options: SpecOptions, num_drafts: int) -> tuple[float, ...] | None:
    """The probability that each draft is accepted, given that all before it were."""
    if options.rejection_sample_method != "synthetic":
        return None
    if options.synthetic_acceptance_length is not None:
        length = options.synthetic_acceptance_length
        if not _is_number(length) or not 1 <= length <= num_drafts + 1:
            raise _refuse(
                f"has synthetic_acceptance_length={length!r}: use 1 to {num_drafts + 1}, the "
                "tokens per step"
            )
        # Accept the first positions always, and the next one with the remaining fraction.
        rates = [min(max(length - 1 - j, 0.0), 1.0) for j in range(num_drafts)]
    else:
        given = options.synthetic_acceptance_rates
        listed = isinstance(given, Sequence) and not isinstance(given, str)
        rates = list(given) if listed and given is not None else []
        good = len(rates) == num_drafts and all(_is_number(r) and 0 <= r <= 1 for r in rates)
        if not good or any(b > a for a, b in itertools.pairwise(rates)):
            raise _refuse(
                f"has synthetic_acceptance_rates={given!r}: use {num_drafts} numbers from 0 to 1 "
                "that never rise"
            )
    before = [1.0, *rates]
    return tuple(b / a if a else 0.0 for a, b in zip(before, rates, strict=False))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        other = ""
        if name == "num_speculative_tokens":
            other = ", or auto; for no drafts at all, set speculative_config to none"
        raise _refuse(f"has {name}={shown(value)}: use a whole number from {low} to {high}{other}")
    return value
