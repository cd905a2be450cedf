"""What xgrammar gets wrong in its own grammars, and what is left of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import RequestError, StructuredOutputs
from stoop.grammar.compiler import GrammarStore
from stoop.grammar.ebnf import mend
from stoop.grammar.parsing import parse
from support.grammars import VOCAB_SIZE

SURROGATE, LAST_BEFORE, FIRST_AFTER = b"\xed\xa0\x80", b"\xed\x9f\xbf", b"\xee\x80\x80"


@pytest.fixture(scope="module")
def store(model: Path) -> GrammarStore:
    return GrammarStore(str(model), VOCAB_SIZE)


def accepts(store: GrammarStore, text: bytes, **asked: object) -> bool:
    compiled = store.get(StructuredOutputs(**asked))  # type: ignore[arg-type]
    by_byte = {p: i for i, p in reversed([*enumerate(compiled.vocabulary.pieces)])}
    eos = compiled.vocabulary.texts.index(b"</s>")
    follower = compiled.follow([eos], None)
    bits = torch.zeros(1, -(-VOCAB_SIZE // 32), dtype=torch.int32)
    for byte in text:
        token = by_byte[bytes([byte])]
        (row,) = follower.fill([], bits, 0)
        if row == 0 and not int(bits[0, token // 32]) >> (token % 32) & 1:
            return False
        if not follower.advance([token]):
            return False
    return follower.advance([eos]) == 1


@pytest.mark.parametrize(
    ("asked", "around"),
    [
        ({"json": '{"type": "string", "maxLength": 3}'}, b'"'),
        ({"json": '{"type": "string", "minLength": 1}'}, b'"'),
        ({"json": '{"type": "string", "pattern": "^[^a]$"}'}, b'"'),
        ({"json": '{"type": "string", "pattern": "^.$"}'}, b'"'),
        ({"json": r'{"type": "string", "pattern": "^(\\S|\\D|\\W)$"}'}, b'"'),
        ({"regex": "."}, b""),
        ({"regex": "[^a]"}, b""),
        ({"regex": r"\[\^x\][^x]"}, b""),
        ({"grammar": r"root ::= [^b]"}, b""),
        ({"grammar": r'root ::= "\"[^" | [\ue000-\U0010ffff] | [c-\U0010ffff]'}, b""),
    ],
)  # fmt: skip
def test_surrogates_are_no_characters(
    store: GrammarStore, asked: dict[str, str], around: bytes
) -> None:
    if "x" in asked.get("regex", ""):
        around = b"[^x]"
        texts = [around + each for each in (SURROGATE, LAST_BEFORE, FIRST_AFTER)]
    else:
        texts = [around + each + around for each in (SURROGATE, LAST_BEFORE, FIRST_AFTER)]
    assert [accepts(store, text, **asked) for text in texts] == [False, True, True]


def in_tag(content: dict[str, Any]) -> dict[str, str]:
    part = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": part})}


def schema_in_tag(schema: dict[str, Any], **more: Any) -> dict[str, str]:
    return in_tag({"type": "json_schema", "json_schema": schema, **more})


BOUNDED = {"type": "string", "maxLength": 3}
PARAMETER = {"type": "object", "properties": {"a": BOUNDED}, "required": ["a"]}


@pytest.mark.parametrize(
    ("asked", "before", "after"),
    [
        (schema_in_tag(BOUNDED), b'<"', b'">'),
        (schema_in_tag({"type": "string", "minLength": 1}), b'<"', b'">'),
        (schema_in_tag({"type": "string", "pattern": "^[^a]$"}), b'<"', b'">'),
        (schema_in_tag(PARAMETER, style="qwen_xml"), b"<<parameter=a>", b"</parameter>>"),
        (in_tag({"type": "regex", "pattern": "."}), b"<", b">"),
        (in_tag({"type": "regex", "pattern": "[^a]"}), b"<", b">"),
        (in_tag({"type": "grammar", "grammar": "root ::= [^a]"}), b"<", b">"),
    ],
)
def test_surrogates_are_no_characters_in_tags(
    store: GrammarStore, asked: dict[str, str], before: bytes, after: bytes
) -> None:
    texts = [before + each + after for each in (SURROGATE, LAST_BEFORE, FIRST_AFTER)]
    assert [accepts(store, text, **asked) for text in texts] == [False, True, True]


def test_every_part_of_a_tag_is_still_there_when_it_is_mended(store: GrammarStore) -> None:
    """The library reads again what it prints: free text, triggers, what is left out of them."""
    tag = {
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": BOUNDED},
        "end": "</f>",
    }
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag], "excludes": ["q"]}
    tags = {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}
    for text, wanted in (
        (b'a<f>"abc"</f>b<f>""</f>', True),
        (b"no tag", True),
        (b'<f>"abcd"</f>', False),
        (b'<f>"a\tb"</f>', False),
        (b"<f>x</f>", False),
        (b"q", False),
    ):
        assert accepts(store, text, **tags) == wanted, text
    short = in_tag({"type": "sequence", "elements": [
        {"type": "regex", "pattern": "[^a]"}, {"type": "any_text", "max_chars": 2}]})  # fmt: skip
    assert [accepts(store, text, **short) for text in (b"<bcd>", b"<bcde>", b"<a>")] == [
        True, False, False]  # fmt: skip


def test_a_tag_that_cannot_be_mended_is_refused(store: GrammarStore) -> None:
    free = {"type": "any_tokens"}
    accepts(store, b"<>", **in_tag(free))  # nothing to mend
    both = {"type": "sequence", "elements": [free, {"type": "regex", "pattern": "[^a]"}]}
    with pytest.raises(RequestError, match="name a token to exclude, or use any_text"):
        parse(StructuredOutputs(**in_tag(both)))
    both["elements"] = [free | {"exclude_tokens": [3]}, both["elements"][1]]
    assert parse(StructuredOutputs(**in_tag(both)))


@pytest.mark.parametrize("byte", [9, 32])
def test_classes_of_the_user_hold_what_they_say(store: GrammarStore, byte: int) -> None:
    """Even one that looks like the library's class for strings."""
    text = bytes([byte])
    assert accepts(store, text, grammar=r'root ::= [^"\\\r\n]')
    assert accepts(store, b"<" + text + b">", **in_tag({"type": "regex", "pattern": r'[^"\\\r\n]'}))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (0, 1), (0, 5), (2, 2), (1, 4), (3, 40), (1, 256), (2, 300)]
)
def test_lengths_of_strings(store: GrammarStore, low: int, high: int) -> None:
    schema = {"type": "string", "minLength": low, "maxLength": high}
    asked = {"json": json.dumps({"type": "array", "items": schema})}
    for count in {0, 1, low - 1, low, low + 1, high - 1, high, high + 1} - {-1}:
        for letter in ("a", "é"):
            one = f'"{letter * count}"'.encode()
            assert accepts(store, b"[" + one + b"]", **asked) == (low <= count <= high), count


def test_strings_share_the_rules_that_count() -> None:
    schema = {"type": "object", "properties": {
        name: {"type": "string", "maxLength": length}
        for name, length in (("a", 7), ("bounded_string_1", 30), ("c", 5000))
    }}  # fmt: skip
    text = str(parse(StructuredOutputs(json=schema)))
    assert "\nbounded_string__30 ::=" in text and "bounded_string__7\n" not in text
    assert len(re.findall(r"(?m)^bounded_string__\d+ ::=", text)) == 31
    assert re.search(r'"\\"" \w+_characters\{0, 5000\} "\\""', text)


@pytest.mark.parametrize("limits", [(0, 3), (0, 1), (1, 1), (1, 300), (0, None)])
@pytest.mark.parametrize("byte", [0, 1, 9, 10, 13, 21, 31, 34, 92])
def test_strings_hold_no_control_characters(
    store: GrammarStore, limits: tuple[int, int | None], byte: int
) -> None:
    least, most = limits
    schema: dict[str, Any] = {"type": "string"} | ({"minLength": least} if least else {})
    schema |= {} if most is None else {"maxLength": most}
    asked = {"json": json.dumps(schema)}
    assert not accepts(store, b'"' + bytes([byte]) + b'"', **asked)
    assert accepts(store, b'"a"', **asked)
    assert accepts(store, b'""', **asked) == (least == 0)
    assert accepts(store, b'"ab"', **asked) == (most != 1)


def test_classes_that_users_write_keep_control_characters(store: GrammarStore) -> None:
    """Only in schemas is a class of this form a string's."""
    asked = {"grammar": r'root ::= "\"" [^"\\\r\n]? "\""'}
    assert accepts(store, b'"\x15"', **asked)
    assert accepts(store, b'""', **asked)


def test_literals_stay_as_they_are() -> None:
    text = r'root ::= "[^a] \" [b-\U0010ffff]" [^a\]] | [a-\U0010ffff] | [\uf000-\U0010ffff]'
    wanted = (
        r'root ::= "[^a] \" [b-\U0010ffff]" [^a\]\ud800-\udfff] | '
        r"[a-\ud7ff\ue000-\U0010ffff] | [\uf000-\U0010ffff]"
    )
    assert mend(text) == wanted
