"""The tokenizer inside a GGUF file, written as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from stoop.config.errors import CheckpointError
from stoop.config.values import MAX_SHOWN

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import pre_tokenizers

WORD_START = "\u2581"  # SentencePiece writes a space as this block character
# Tokens of real vocabularies have a few hundred characters at most. Every way of splitting one in
# two may be a merge, so the work grows with the square of its length.
MAX_PIECE_CHARS = 4096
# The most characters in merges per character in the vocabulary; real ones have 2 to 5.
MAX_MERGE_GROWTH = 64

# How text is split before byte-pair merging, by GGUF's name of the rule. The patterns are those
# that the models' authors publish; several patterns are applied in sequence.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SINGLE_DIGIT_PATTERN = r"\p{N}"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
# Accents and vowel signs belong to words.
QWEN35_PATTERN = QWEN2_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What llama.cpp uses for files that name no rule.
DEFAULT_PATTERNS = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")

SPLIT_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": DEFAULT_PATTERNS,
    "gpt-2": (GPT2_PATTERN,),
    "smollm": (SINGLE_DIGIT_PATTERN, GPT2_PATTERN),
    "starcoder": (SINGLE_DIGIT_PATTERN, GPT2_PATTERN),
    "refact": (SINGLE_DIGIT_PATTERN, GPT2_PATTERN),
    "codeshell": (SINGLE_DIGIT_PATTERN, GPT2_PATTERN),
    "llama-bpe": (LLAMA3_PATTERN,),
    "llama3": (LLAMA3_PATTERN,),
    "llama-v3": (LLAMA3_PATTERN,),
    "lfm2": (LLAMA3_PATTERN,),
    "dbrx": (LLAMA3_PATTERN,),  # Granite 4.0
    "qwen2": (QWEN2_PATTERN,),
    "deepseek-r1-qwen": (QWEN2_PATTERN,),
    "qwen35": (QWEN35_PATTERN,),
    "tekken": (TEKKEN_PATTERN,),
}
LLAMA3_RULES = frozenset({"llama-bpe", "llama3", "llama-v3", "lfm2"})
# These keep a word that is in the vocabulary whole, without merging, and start text with bos.
WHOLE_WORD_RULES = LLAMA3_RULES | {"tekken"}
QWEN_RULES = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35"})


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenizerFields:
    """The tokenizer's metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = str(self.get("model", "unnamed"))
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise CheckpointError("this GGUF file holds no tokenizer: use one that does")
        self.tokens: list[str] = tokens
        self.types: list[int] = self.get("token_type") or [TokenType.NORMAL] * len(tokens)
        if len(self.types) != len(tokens):
            raise CheckpointError(
                "this GGUF file has more tokens than token types: download it again"
            )
        # A name that occurs twice keeps its first id.
        self.vocabulary: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            self.vocabulary.setdefault(token, token_id)

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def token(self, role: str) -> str | None:
        """The text of the token in a role such as bos, or None."""
        token_id = self.get(f"{role}_token_id")
        if token_id is None or not 0 <= token_id < len(self.tokens):
            return None
        return self.tokens[token_id]

    @property
    def split_rule(self) -> str:
        return str(self.get("pre", "default"))

    @property
    def adds_bos(self) -> bool:
        by_default = self.model == "llama" or self.split_rule in WHOLE_WORD_RULES
        return bool(self.get("add_bos_token", by_default)) and self.token("bos") is not None

    @property
    def adds_eos(self) -> bool:
        return bool(self.get("add_eos_token", False)) and self.token("eos") is not None


def build_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer from a GGUF file's metadata; refuses unknown kinds by name."""
    fields = TokenizerFields(metadata)
    if fields.model == "gpt2":
        tokenizer = _build_byte_level(fields)
    elif fields.model == "llama":
        tokenizer = _build_sentencepiece(fields)
    else:
        raise CheckpointError(
            f"GGUF tokenizers of model {fields.model[:MAX_SHOWN]!r} cannot be loaded: use gpt2 or "
            "llama"
        )
    _add_tokens(tokenizer, fields)
    _add_template(tokenizer, fields)
    return tokenizer


def build_tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens and the chat template."""
    fields = TokenizerFields(metadata)
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = {key: fields.token(role) for key, role in roles.items()}
    config: dict[str, Any] = {key: token for key, token in tokens.items() if token is not None}
    config["add_bos_token"] = fields.adds_bos
    config["add_eos_token"] = fields.adds_eos
    config["clean_up_tokenization_spaces"] = False
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = _chat_template(metadata)
    if template is not None:
        config["chat_template"] = template
    return config


def _chat_template(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    default = metadata.get("tokenizer.chat_template")
    named = {
        name: metadata[f"tokenizer.chat_template.{name}"]
        for name in metadata.get("tokenizer.chat_templates") or []
        if f"tokenizer.chat_template.{name}" in metadata
    }
    if not named:
        return default
    if default is not None:
        named["default"] = default
    return [{"name": name, "template": template} for name, template in named.items()]


def _build_byte_level(fields: TokenizerFields) -> tokenizers.Tokenizer:
    from tokenizers import decoders, normalizers

    rule = fields.split_rule
    if rule not in SPLIT_PATTERNS:
        raise CheckpointError(
            f"GGUF tokenizers with the pre-tokenizer {rule[:MAX_SHOWN]!r} cannot be loaded: "
            "use the model's folder in Hugging Face layout instead"
        )
    merges = [_split_merge(merge) for merge in fields.get("merges") or []]
    tokenizer = _new_tokenizer(fields, merges, ignore_merges=rule in WHOLE_WORD_RULES)
    tokenizer.pre_tokenizer = _splitter(SPLIT_PATTERNS[rule])
    tokenizer.decoder = decoders.ByteLevel()
    if rule in QWEN_RULES:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _new_tokenizer(
    fields: TokenizerFields, merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models

    try:
        return Tokenizer(models.BPE(vocab=fields.vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            f"this GGUF file's tokenizer is inconsistent ({str(error)[:MAX_SHOWN]}): "
            "download it again"
        ) from error


def _splitter(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])


def _split_merge(merge: str) -> tuple[str, str]:
    # The separating space is never the first character: in vocabularies that are not byte-level,
    # a piece may begin with a space.
    left, separator, right = merge[1:].partition(" ")
    if not separator or not right:
        raise CheckpointError(
            f"this GGUF file has the broken merge {merge[:MAX_SHOWN]!r}: use another file of "
            "this model"
        )
    return merge[0] + left, right


def _build_sentencepiece(fields: TokenizerFields) -> tokenizers.Tokenizer:
    from tokenizers import decoders, normalizers

    tokenizer = _new_tokenizer(
        fields,
        list(_merges_by_score(fields)),
        unk_token=fields.token("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    to_blocks: list[normalizers.Normalizer] = [normalizers.Replace(" ", WORD_START)]
    from_blocks: list[decoders.Decoder] = [
        decoders.Replace(WORD_START, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if fields.get("add_space_prefix", True):
        to_blocks = [normalizers.Prepend(WORD_START), *to_blocks]
        from_blocks = [*from_blocks, decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(to_blocks)
    tokenizer.decoder = decoders.Sequence(from_blocks)
    return tokenizer


def _merges_by_score(fields: TokenizerFields) -> Iterator[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best, so every split of a piece into two
    others is a merge, and the best piece comes first."""
    scores = fields.get("scores")
    if not isinstance(scores, list) or len(scores) != len(fields.tokens):
        raise CheckpointError(
            "this GGUF file's tokenizer has no score for each token: use another file"
        )
    pieces = {
        token: scores[token_id]
        for token, token_id in fields.vocabulary.items()
        if fields.types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    lengths = {len(piece) for piece in pieces}
    if lengths and max(lengths) > MAX_PIECE_CHARS:
        raise CheckpointError(
            f"this GGUF file has a token of {max(lengths)} characters, where at most "
            f"{MAX_PIECE_CHARS} are supported: use another file of this model"
        )
    room = MAX_MERGE_GROWTH * sum(map(len, pieces))
    for piece in sorted(pieces, key=lambda piece: (-pieces[piece], fields.vocabulary[piece])):
        known = _known_halves(piece, pieces, lengths)
        room -= len(known) * len(piece)
        if room < 0:
            raise CheckpointError(
                "this GGUF file's tokens can be merged in far more ways than those of any known "
                "model: use another file of this model"
            )
        yield from sorted(known, key=lambda pair: [fields.vocabulary[half] for half in pair])


def _known_halves(
    piece: str, pieces: Mapping[str, float], lengths: AbstractSet[int]
) -> list[tuple[str, str]]:
    """The splits of a piece into two others."""
    size = len(piece)
    cuts = (cut for cut in range(1, size) if cut in lengths and size - cut in lengths)
    halves = ((piece[:cut], piece[cut:]) for cut in cuts)
    return [pair for pair in halves if pair[0] in pieces and pair[1] in pieces]


def _add_tokens(tokenizer: tokenizers.Tokenizer, fields: TokenizerFields) -> None:
    from tokenizers import AddedToken

    special_types = {TokenType.CONTROL}
    if fields.model == "llama":
        special_types.add(TokenType.UNKNOWN)
    added = [
        AddedToken(fields.tokens[token_id], special=kind in special_types, normalized=False)
        for token_id, kind in enumerate(fields.types)
        if kind in special_types or kind == TokenType.USER_DEFINED
    ]
    tokenizer.add_tokens(added)


def _add_template(tokenizer: tokenizers.Tokenizer, fields: TokenizerFields) -> None:
    from tokenizers import processors

    bos = fields.token("bos") if fields.adds_bos else None
    eos = fields.token("eos") if fields.adds_eos else None
    if bos is None and eos is None:
        return
    around = [token for token in (bos, eos) if token is not None]
    one, two = ([bos, piece] if bos else [piece] for piece in ("$A:0", "$B:1"))
    tail = [eos] if eos else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*one, *tail],
        pair=[*one, *tail, *two, *tail],
        special_tokens=[(token, fields.vocabulary[token]) for token in dict.fromkeys(around)],
    )
