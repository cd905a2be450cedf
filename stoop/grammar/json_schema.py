"""Checks of JSON schemas: what xgrammar would ignore without an error is refused by name.

An answer that matches the grammar must validate against the schema. Keywords that the library
honours only in part are refused in the other cases, so some schemas that it takes are refused here.
"""

import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoop.config.errors import RequestError
from stoop.config.values import shown
from stoop.grammar.regex import check_regex, without_surrogates

# Keywords that constrain nothing, or that other keywords refer to.
_NOTES = frozenset(
    (
        "$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "$vocabulary", "title",
        "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
        "contentEncoding", "contentMediaType", "contentSchema",
    )
)  # fmt: skip
_REFUSED = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "contains", "minContains", "maxContains", "uniqueItems", "additionalItems", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
_STRING = frozenset(("minLength", "maxLength", "pattern", "format"))
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_NUMBER = _BOUNDS | {"multipleOf"}
_ARRAY = frozenset(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"))
_OBJECT = frozenset(
    (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "unevaluatedProperties",
    )
)  # fmt: skip
_CONSTRAINTS = _STRING | _NUMBER | _ARRAY | _OBJECT | {"type", "enum", "const"}
_JOINS = ("anyOf", "oneOf", "allOf")
_FORMATS = frozenset(
    (
        "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri",
        "uri-reference", "uri-template",
    )
)  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}

MAX_ONE_OF = 64  # schemas that do not list their values


def check_schema(schema: Any) -> None:
    """Refuse what cannot be honoured."""
    try:
        for node in _nodes(schema):
            _Node(node, schema).check()
    except RecursionError:
        raise _refusal("is nested too deeply", "make it flatter") from None


def for_library(schema: Any) -> Any:
    """The same schema as xgrammar reads it: items may be anything where it says nothing of them,
    and patterns match no surrogates."""
    schema = copy.deepcopy(schema)
    for node in list(_nodes(schema)):
        silent = "items" not in node and "prefixItems" not in node
        if silent and "array" in _types(node) and set(node) - _NOTES - {"type"}:
            node["items"] = {}
        if "pattern" in node:
            node["pattern"] = without_surrogates(node["pattern"])
        if "patternProperties" in node:
            inner = node["patternProperties"].items()
            node["patternProperties"] = {without_surrogates(name): each for name, each in inner}
    return schema


def close_objects(schema: Any) -> Any:
    """The schema with no properties but those that it names."""
    schema = copy.deepcopy(schema)
    for node in list(_nodes(schema)):
        if "properties" in node:
            node["additionalProperties"] = False
    return schema


def _refusal(what: str, advice: str) -> RequestError:
    return RequestError(f"the schema of structured_outputs.json {what}: {advice}")


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema in a schema, itself first."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _refusal(f"has {shown(schema)} where a schema is needed", "use an object")
    yield schema
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(name, {})
        if not isinstance(inner, dict):
            raise _refusal(f"has {name}={shown(inner)}", "use an object of schemas")
        for each in inner.values():
            yield from _nodes(each)
    for name in ("additionalProperties", "items", "propertyNames"):
        if name in schema:
            yield from _nodes(schema[name])
    for name in (*_JOINS, "prefixItems"):
        inner = schema.get(name, [])
        if not isinstance(inner, list):
            raise _refusal(f"has {name}={shown(inner)}", "use a list of schemas")
        for each in inner:
            yield from _nodes(each)


def _types(node: Mapping[str, Any]) -> list[Any]:
    given = node.get("type", [])
    return given if isinstance(given, list) else [given]


@dataclass(frozen=True)
class _Marks:
    """What tells a schema's values from another's."""

    values: set[str] | None  # all of them, if it lists them
    kinds: set[Any]
    fixed: dict[str, set[str]]  # the values of properties that every object has


def _disjoint(one: _Marks, other: _Marks) -> bool:
    if one.values is not None and other.values is not None:
        return one.values.isdisjoint(other.values)
    if one.kinds and other.kinds and one.kinds.isdisjoint(other.kinds):
        return True
    shared = one.fixed.keys() & other.fixed.keys()
    return any(one.fixed[name].isdisjoint(other.fixed[name]) for name in shared)


class _Node:
    """One schema in a schema. root: the whole one, to which references point"""

    def __init__(self, node: dict[str, Any], root: Any) -> None:
        self.node = node
        self.root = root
        self.types = _types(node)

    def check(self) -> None:
        for name in _REFUSED:
            if name in self.node and self.node[name] is not False:
                raise _refusal(f"has {name!r}, which no grammar can honour", "leave it out")
        self._check_joins()
        self._check_values()
        if "type" not in self.node and not self._has("enum", "const", "$ref", *_JOINS):
            self._check_untyped()
        self._check_strings()
        self._check_numbers()
        self._check_objects()
        for name, kind in (("unevaluatedItems", bool), ("unevaluatedProperties", bool)):
            if not isinstance(self.node.get(name, False), kind):
                raise _refusal(f"has a schema for {name!r}", "use true or false")

    def _has(self, *names: str) -> list[str]:
        return [name for name in names if name in self.node]

    def _alone(self, name: str, *beside: str) -> None:
        """Refuse constraints beside one that makes the library ignore them."""
        every = _CONSTRAINTS | {"$ref", *_JOINS}
        others = sorted(set(self.node) & (every - {name, *beside}))
        if others:
            raise _refusal(
                f"has {others[0]!r} beside {name!r}, where it would be ignored",
                "move it into the other schema",
            )

    def _check_joins(self) -> None:
        if "$ref" in self.node:
            self._alone("$ref")
            self._resolve(self.node)
        for name in self._has(*_JOINS):
            branches = self.node[name]
            same = all(_types(self._resolve(each)) == self.types for each in branches)
            self._alone(name, *(["type"] if same else []))
            if name == "allOf" and len(branches) > 1:
                raise _refusal("has 'allOf' of several schemas", "merge them into one")
            if name == "oneOf":
                self._check_one_of([self._resolve(each) for each in branches])

    def _check_one_of(self, branches: list[dict[str, Any]]) -> None:
        """Refuse branches that may overlap. Pairs are compared, so there must not be too many."""
        every = [_values(each) for each in branches]
        listed = [values for values in every if values is not None]
        if len(listed) == len(branches):
            overlap = len(set().union(*listed)) < sum(map(len, listed))
        elif len(branches) > MAX_ONE_OF:
            raise _refusal(f"has 'oneOf' of {len(branches)} schemas", f"use at most {MAX_ONE_OF}")
        else:
            marks = [self._marks(each) for each in branches]
            overlap = not all(
                _disjoint(one, other) for one, other in itertools.combinations(marks, 2)
            )
        if overlap:
            raise _refusal("has 'oneOf' of schemas that one value may match both", "use 'anyOf'")

    def _marks(self, node: dict[str, Any]) -> "_Marks":
        kinds = {"number" if kind == "integer" else kind for kind in _types(node)}
        properties = node.get("properties", {})
        required = [each for each in node.get("required", []) if each in properties]
        found = ((name, _values(self._resolve(properties[name]))) for name in required)
        fixed = {name: values for name, values in found if values is not None}
        return _Marks(_values(node), kinds, fixed if kinds == {"object"} else {})

    def _resolve(self, node: Any) -> dict[str, Any]:
        """What a reference within the schema points to."""
        for _ in range(64):
            if not isinstance(node, dict) or "$ref" not in node:
                return node if isinstance(node, dict) else {}
            path = node["$ref"]
            if not isinstance(path, str) or not re.fullmatch(r"#(/.*)?", path):
                raise _refusal(f"has $ref={shown(path)}", "refer to places in the schema, #/...")
            node = self.root
            for part in path.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(node, dict) or part not in node:
                    raise _refusal(f"has $ref={shown(path)}, and nothing is there", "correct it")
                node = node[part]
        raise _refusal("has a $ref that leads to itself", "correct it")

    def _check_values(self) -> None:
        for name in self._has("enum", "const"):
            self._alone(name, "type")
            values = self.node["enum"] if name == "enum" else [self.node["const"]]
            if not isinstance(values, list):
                raise _refusal(f"has enum={shown(values)}", "use a list")
            for value in values:
                if "type" in self.node and not _is_of(value, self.types):
                    raise _refusal(
                        f"has {shown(value)} in {name!r} and type={shown(self.node['type'])}",
                        "make them agree",
                    )

    def _check_untyped(self) -> None:
        # Properties and items alone imply their type.
        known: frozenset[str] = frozenset()
        if "properties" in self.node:
            known = _OBJECT
        elif "items" in self.node:
            known = _ARRAY
        others = sorted(set(self.node) & (_CONSTRAINTS - known))
        if others:
            raise _refusal(f"has {others[0]!r} without a 'type'", "add the type")

    def _check_strings(self) -> None:
        node = self.node
        if "format" in node and node["format"] not in _FORMATS:
            raise _refusal(
                f"has format={shown(node['format'])}",
                f"use one of {', '.join(sorted(_FORMATS))}, or a 'pattern'",
            )
        for name in self._has("pattern", "format"):
            others = [each for each in self._has(*sorted(_STRING)) if each != name]
            if others:
                raise _refusal(f"has {others[0]!r} beside {name!r}", "put both into one 'pattern'")
        for pattern in [*self._patterns()]:
            if not isinstance(pattern, str):
                raise _refusal(f"has a pattern {shown(pattern)}", "use text")
            check_regex("a pattern of structured_outputs.json", pattern, in_json=True)

    def _patterns(self) -> Iterator[Any]:
        if "pattern" in self.node:
            yield self.node["pattern"]
        yield from self.node.get("patternProperties", {})

    def _check_numbers(self) -> None:
        if "multipleOf" in self.node and (self.types != ["integer"] or self._has(*_BOUNDS)):
            raise _refusal(
                "has 'multipleOf' for other numbers than integers without bounds", "leave it out"
            )

    def _check_objects(self) -> None:
        node = self.node
        names = node.get("properties", {})
        missing = [each for each in node.get("required", []) if each not in names]
        if missing:
            raise _refusal(
                f"requires {shown(missing[0])}, which its 'properties' do not name", "name it there"
            )
        patterns = node.get("patternProperties", {})
        is_open = node.get("additionalProperties", False) is not False
        if patterns and (len(patterns) > 1 or is_open or "propertyNames" in node):
            raise _refusal(
                "has 'patternProperties' with more than one pattern, or beside "
                "'additionalProperties' or 'propertyNames'",
                "use one pattern alone",
            )
        if patterns and names:
            # Whether a name matches is not tried out here: a pattern may take for ever.
            raise _refusal("has 'patternProperties' beside 'properties'", "leave one of them out")
        if "propertyNames" in node and names:
            raise _refusal("has 'propertyNames' beside 'properties'", "leave one of them out")
        many = node.get("minProperties", 0)
        if (is_open or patterns or "propertyNames" in node) and many > 1:
            raise _refusal(
                f"has minProperties={shown(many)} and other names than its 'properties'",
                "name the properties",
            )


def _values(node: Mapping[str, Any]) -> set[str] | None:
    """The only values that a schema allows, if it lists them."""
    if "const" in node:
        return {json.dumps(node["const"], sort_keys=True)}
    if isinstance(node.get("enum"), list):
        return {json.dumps(each, sort_keys=True) for each in node["enum"]}
    return None


def _is_of(value: Any, types: list[Any]) -> bool:
    for name in types:
        wanted = _TYPES.get(name, ()) if isinstance(name, str) else ()
        if isinstance(value, bool) and bool not in wanted:
            continue
        if isinstance(value, wanted):
            return True
    return False
