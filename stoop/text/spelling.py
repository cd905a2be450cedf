"""What a token spells, in bytes; one token may be half a character."""

import json
from typing import Any

_KINDS = {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}


class Speller:
    """Turns a token of the vocabulary into bytes, as the tokenizer's decoder does."""

    @staticmethod
    def of(decoder_settings: str) -> "Speller | None":
        """None if the decoder is of a kind that is not understood. Its settings are JSON."""
        decoder = json.loads(decoder_settings)
        if decoder is None:
            return None
        parts = decoder.get("decoders", [decoder])
        if not {part.get("type") for part in parts} & _KINDS:
            return None
        return Speller(parts)

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


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte: itself if it can be printed, else
    the next one from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printed}
    others = [byte for byte in range(256) if byte not in printed]
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_letters()
