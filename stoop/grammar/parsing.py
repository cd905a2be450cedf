"""From what a user asks for to a grammar of xgrammar's; a bad one is refused with one sentence."""

import contextlib
import importlib
import json
import re
from functools import lru_cache
from typing import Any

from stoop.config.errors import RequestError
from stoop.core.structured import StructuredOutputs
from stoop.grammar.ebnf import mend
from stoop.grammar.json_schema import check_schema, close_objects, for_library
from stoop.grammar.regex import check_regex

MISSING = "structured_outputs need xgrammar: run pip install 'stoop[structured]'"


def load_xgrammar() -> Any:
    """The library, imported when first needed."""
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise RequestError(MISSING) from error


def import_early() -> None:
    """Import the library now, if it is there: it takes a second or more."""
    with contextlib.suppress(RequestError):
        load_xgrammar()


@lru_cache(maxsize=64)
def parse(asked: StructuredOutputs) -> Any:
    """An xgrammar.Grammar. It needs no tokenizer, so a front end can check requests with it."""
    xgrammar = load_xgrammar()
    build = _BUILDERS[asked.kind]
    try:
        return build(xgrammar.Grammar, asked)
    except RequestError:
        raise
    except Exception as error:  # the library raises several classes for bad text
        raise RequestError(
            f"structured_outputs.{asked.kind} cannot be used ({first_sentence(error)}): correct it"
        ) from None


def first_sentence(error: BaseException) -> str:
    """What an error of the library says, without its place in the library's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    text = re.sub(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", text)
    return text.rstrip(".")[:300]


def _json(grammar: Any, asked: StructuredOutputs) -> Any:
    schema = read_json("json", asked.json)
    check_schema(schema)
    schema = for_library(schema)
    if asked.disable_additional_properties:
        schema = close_objects(schema)
    # Objects have the properties that the schema names, unless it says otherwise, as in vLLM.
    return _mended(
        grammar,
        grammar.from_json_schema(
            json.dumps(schema), any_whitespace=not asked.disable_any_whitespace, strict_mode=True
        ),
        of_schema=True,
    )


def _json_object(grammar: Any, asked: StructuredOutputs) -> Any:
    schema = json.dumps({"type": "object", "additionalProperties": True})
    return grammar.from_json_schema(schema, any_whitespace=not asked.disable_any_whitespace)


def _regex(grammar: Any, asked: StructuredOutputs) -> Any:
    assert asked.regex is not None
    check_regex("structured_outputs.regex", asked.regex)
    return _mended(grammar, grammar.from_regex(asked.regex))


def _choice(grammar: Any, asked: StructuredOutputs) -> Any:
    assert asked.choice is not None
    texts = " | ".join(json.dumps(text) for text in asked.choice)
    return grammar.from_ebnf(f"root ::= {texts}")


def _ebnf(grammar: Any, asked: StructuredOutputs) -> Any:
    return _mended(grammar, grammar.from_ebnf(asked.grammar))


def _structural_tag(grammar: Any, asked: StructuredOutputs) -> Any:
    tag = _checked(read_json("structural_tag", asked.structural_tag))
    built = grammar.from_structural_tag(json.dumps(tag))
    try:
        return _mended(grammar, built)
    except Exception as error:
        if "ExcludeToken()" not in str(built):
            raise
        # The library prints it so, and cannot read it.
        raise RequestError(
            "structured_outputs.structural_tag has any_tokens or exclude_token without "
            "exclude_tokens beside a schema, pattern or grammar: name a token to exclude, or use "
            "any_text"
        ) from error


def _checked(part: Any) -> Any:
    """A part of a structural tag; its schemas and patterns are checked like those on their own."""
    if isinstance(part, list):
        return [_checked(each) for each in part]
    if not isinstance(part, dict):
        return part
    schema, pattern = part.get("json_schema"), part.get("pattern")
    if part.get("type") == "json_schema" and isinstance(schema, dict):
        check_schema(schema)
        return {**part, "json_schema": for_library(schema)}
    if part.get("type") == "regex" and isinstance(pattern, str):
        check_regex("structured_outputs.structural_tag", pattern)
    return {name: _checked(each) for name, each in part.items()}


def _mended(grammar: Any, built: Any, of_schema: bool = False) -> Any:
    text = str(built)
    better = mend(text, of_schema)
    return built if better == text else grammar.from_ebnf(better)


_BUILDERS = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "structural_tag": _structural_tag,
}


def read_json(name: str, text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.{name} is not JSON ({error}): correct it") from None
