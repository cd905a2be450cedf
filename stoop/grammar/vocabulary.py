"""What each token of a model spells, in bytes: grammars are matched byte by byte."""

import json
from dataclasses import dataclass
from typing import Any

from stoop.config.errors import RequestError
from stoop.text.tokenizer import Tokenizer

# A few odd tokens are left out; if many are odd, the tokenizer is not understood.
MAX_ODD_SHARE = 0.05


@dataclass(frozen=True)
class Vocabulary:
    """Bytes by token id, for every logit of the model.

    A token that spells nothing in the middle of a text is b"": grammars never choose it.
    """

    pieces: list[bytes]  # b"" also for special tokens, which do not show in the text
    texts: list[bytes]  # special tokens included

    @staticmethod
    def of(tokenizer: Tokenizer, vocab_size: int) -> "Vocabulary":
        """vocab_size: of the model, which may have more or fewer tokens than the tokenizer"""
        spell = _speller(tokenizer)
        pieces, texts = [b""] * vocab_size, [b""] * vocab_size
        num_odd = 0
        for token, token_id in tokenizer.tokens().items():
            if token_id >= vocab_size:
                continue
            if token_id in tokenizer.special_ids:
                texts[token_id] = token.encode()
                continue
            spelt = spell(token)
            if _decodes_to(tokenizer, token_id, spelt):
                pieces[token_id] = texts[token_id] = spelt
            else:
                num_odd += 1
        if num_odd > MAX_ODD_SHARE * vocab_size:
            raise RequestError(_UNKNOWN)
        return Vocabulary(pieces, texts)


_UNKNOWN = (
    "structured_outputs cannot be used with this model: its tokenizer is neither byte-level nor "
    "of SentencePiece's kind; leave them out"
)


def _decodes_to(tokenizer: Tokenizer, token_id: int, spelt: bytes) -> bool:
    """Whether the decoder agrees, in the middle of a text. Half a character cannot be compared."""
    try:
        text = spelt.decode()
    except UnicodeDecodeError:
        return True
    if tokenizer.anchor_id is None:
        return True
    return tokenizer.decode([tokenizer.anchor_id, token_id])[tokenizer.anchor_length :] == text


class _Speller:
    """Turns a token of the vocabulary into bytes, as the tokenizer's decoder does."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        kinds = {part.get("type") for part in parts}
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        self.replaced: list[tuple[str, str]] = []
        for part in parts:
            if part.get("type") == "Metaspace":
                self.replaced.append((part.get("replacement", "\u2581"), " "))
            elif part.get("type") == "Replace" and "String" in part.get("pattern", {}):
                self.replaced.append((part["pattern"]["String"], part["content"]))

    def __call__(self, token: str) -> bytes:
        if self.byte_level:
            if all(letter in _BYTE_OF for letter in token):
                return bytes(_BYTE_OF[letter] for letter in token)
            return token.encode()
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.replaced:
            token = token.replace(old, new)
        return token.encode()


def _speller(tokenizer: Tokenizer) -> _Speller:
    decoder = json.loads(tokenizer.decoder_settings())
    if decoder is None:
        raise RequestError(_UNKNOWN)
    parts = decoder.get("decoders", [decoder])
    kinds = {part.get("type") for part in parts}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}:
        raise RequestError(_UNKNOWN)
    return _Speller(parts)


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte: itself if it can be printed, else
    the next one from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printed}
    others = [byte for byte in range(256) if byte not in printed]
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_letters()
