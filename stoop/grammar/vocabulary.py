"""What each token of a model spells, in bytes: grammars are matched byte by byte."""

from dataclasses import dataclass

from stoop.config.errors import RequestError
from stoop.text.spelling import Speller
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


def _speller(tokenizer: Tokenizer) -> Speller:
    spell = Speller.of(tokenizer.decoder_settings())
    if spell is None:
        raise RequestError(_UNKNOWN)
    return spell
