"""What an answer must match: a JSON schema, a regular expression, a grammar, one of some texts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from stoop.config.errors import RequestError
from stoop.config.values import shown, unknown_name

_IGNORED = ("disable_fallback",)  # of vLLM: there is one library, so nothing to fall back to
MAX_CHOICES = 4096
MAX_GRAMMAR_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Names are those of vLLM's `structured_outputs`. Exactly one kind of constraint is set.

    With `after`, text up to and including that marker is free, and the constraint begins there:
    the end of a reasoning block, for example. A model that never writes it is never constrained.
    """

    json: str | Mapping[str, Any] | None = None  # a schema, as text or as an object
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # EBNF; the rule `root` is the start
    json_object: bool = False  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # xgrammar's format
    disable_any_whitespace: bool = False  # JSON in one form, without optional spaces
    disable_additional_properties: bool = False  # JSON objects have only the schema's properties
    after: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if _is_set(getattr(self, name))]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise RequestError(
                f"structured_outputs has {found} of {', '.join(KINDS)}: set exactly one"
            )
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, _dump(name, value))
        for name in ("json", "regex", "grammar", "structural_tag", "after"):
            _check_text(name, getattr(self, name))
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                given_value = shown(getattr(self, name))
                raise RequestError(f"structured_outputs.{name}={given_value}: use True or False")
        if self.choice is not None:
            object.__setattr__(self, "choice", _check_choice(self.choice))

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if _is_set(getattr(self, name)))

    @staticmethod
    def of(value: Any) -> "StructuredOutputs | None":
        """From what a user gives: None, an object, or a dictionary of its fields."""
        if value is None or isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"structured_outputs={shown(value)}: use StructuredOutputs or a dictionary"
            )
        known = [each.name for each in fields(StructuredOutputs)]
        given = {k: v for k, v in value.items() if v is not None and k not in _IGNORED}
        for name in given:
            if name not in known:
                raise RequestError(unknown_name("field of structured_outputs", name, known))
        return StructuredOutputs(**given)


def _is_set(value: Any) -> bool:
    """An empty schema is one, too: it allows any JSON."""
    return value is not None and value is not False


KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _dump(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.{name} is not JSON ({error}): correct it") from None


def _check_text(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise RequestError(f"structured_outputs.{name}={shown(value)}: use text")
    if name == "after" and not value:
        raise RequestError("structured_outputs.after is empty: use the text of a marker, or None")
    _check_unicode(name, value)
    if len(value) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"structured_outputs.{name} has {len(value)} characters: use at most "
            f"{MAX_GRAMMAR_BYTES}"
        )


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"structured_outputs.{name} holds a lone surrogate, which is no character: use valid "
            "Unicode"
        ) from None


def _check_choice(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"structured_outputs.choice={shown(value)}: use a list of texts")
    if not value:
        raise RequestError("structured_outputs.choice is empty: give at least one text")
    if len(value) > MAX_CHOICES:
        raise RequestError(
            f"structured_outputs.choice has {len(value)} entries: use at most {MAX_CHOICES}"
        )
    for each in value:
        if not isinstance(each, str) or not each:
            raise RequestError(f"structured_outputs.choice has {shown(each)}: use texts")
        _check_unicode("choice", each)
    return tuple(value)
