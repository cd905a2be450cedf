"""What xgrammar gets wrong in its own grammars, and what is left of it."""

from pathlib import Path

import pytest
import torch

from stoop import StructuredOutputs
from stoop.grammar.compiler import GrammarStore
from stoop.grammar.ebnf import mend
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


@pytest.mark.parametrize("schema", ['{"type": "string", "maxLength": 3}', '{"type": "string"}'])
@pytest.mark.parametrize("byte", [0, 1, 9, 10, 13, 31, 34, 92])
def test_strings_hold_no_control_characters(store: GrammarStore, schema: str, byte: int) -> None:
    assert not accepts(store, b'"' + bytes([byte]) + b'"', json=schema)
    assert accepts(store, b'"ab"', json=schema)


def test_literals_stay_as_they_are() -> None:
    text = r'root ::= "[^a] \" [b-\U0010ffff]" [^a\]] | [a-\U0010ffff] | [\uf000-\U0010ffff]'
    wanted = (
        r'root ::= "[^a] \" [b-\U0010ffff]" [^a\]\ud800-\udfff] | '
        r"[a-\ud7ff\ue000-\U0010ffff] | [\uf000-\U0010ffff]"
    )
    assert mend(text) == wanted
