"""Checks of schemas by a front end, on the thread that serves everyone: they must be quick."""

import time
from typing import Any

import pytest

from stoop import RequestError, StructuredOutputs
from stoop.grammar.json_schema import MAX_ONE_OF, check_schema
from stoop.grammar.parsing import parse
from stoop.grammar.regex import check_regex

OBJECT = {"type": "object"}


def tagged(value: Any, **more: Any) -> dict[str, Any]:
    return OBJECT | {"properties": {"kind": {"const": value}} | more, "required": ["kind"]}


@pytest.mark.parametrize(
    "branches",
    [
        [{"const": 1}, {"const": 2}, {"enum": ["a", "b"]}],
        [{"type": "string"}, {"type": "integer"}, {"type": ["null", "boolean"]}],
        [tagged("a"), tagged("b", x={"type": "string"})],
        [{"type": "string"}, tagged("a"), {"type": "array"}],
        [{"const": each} for each in range(4000)],
    ],
)
def test_branches_that_exclude_each_other(branches: list[Any]) -> None:
    check_schema({"oneOf": branches})


@pytest.mark.parametrize(
    "branches",
    [
        [{"const": 1}, {"enum": [2, 1]}],
        [{"type": "number"}, {"type": "integer"}],
        [{"type": "string"}, {"const": "a"}],
        [tagged("a"), tagged("a")],
        [tagged("a"), OBJECT],
        [tagged("a"), OBJECT | {"properties": {"kind": {"const": "b"}}}],
    ],
)
def test_branches_that_may_overlap(branches: list[Any]) -> None:
    with pytest.raises(RequestError, match="match both"):
        check_schema({"oneOf": branches})


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"oneOf": [tagged(each) for each in range(4000)]}, f"use at most {MAX_ONE_OF}"),
        (
            OBJECT | {"properties": {"a" * 60 + "b": {}}, "patternProperties": {"^(a+)+$": {}}},
            "leave one of them out",
        ),
    ],
)
def test_a_check_does_not_hold_up_others(schema: Any, sentence: str) -> None:
    """Both took minutes or years: pairs of schemas, and a pattern that backtracks."""
    started = time.perf_counter()
    with pytest.raises(RequestError, match=sentence):
        parse(StructuredOutputs(json=schema))
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("end", ["", "\\", "\\]"])
def test_brackets_without_an_end_are_found_at_once(end: str) -> None:
    """Each of them was searched for its end: hours for a million."""
    started = time.perf_counter()
    with pytest.raises(RequestError, match=r"close it, or write \\\["):
        check_regex("structured_outputs.regex", "[" * 200_000 + end)
    assert time.perf_counter() - started < 5
    check_regex("structured_outputs.regex", r"[[\]a]|[]x]|[^]]|\[|a[bc]")
