"""A tokenizer as Llama 2 and Mistral have it: words begin with a block, unknown characters fall
back to bytes, and encoding puts a bos in front."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS = 1, 2
BLOCK = "\u2581"
WORDS = ("blue", "sky", "is")
LETTERS = "abcdefghijklmnopqrstuvwxyz[]/INST.,!:"
# As Llama 2 writes a conversation.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def build(metaspace: bool = False) -> tokenizers.Tokenizer:
    """metaspace: by a pre-tokenizer, as newer conversions do, instead of a normaliser"""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], BLOCK, *LETTERS]
    merges = []
    for word in WORDS:
        for end in range(1, len(word) + 1):
            pieces.append(BLOCK + word[:end])
            merges.append((BLOCK + word[: end - 1], word[end - 1]))
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=list(dict.fromkeys(merges)),
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=BLOCK, prepend_scheme="first", split=False
        )
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(BLOCK, "first"), decoders.Fuse()]
        )
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(BLOCK), normalizers.Replace(" ", BLOCK)]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace(BLOCK, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    special = [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return backend


def write_tokenizer(folder: Path, metaspace: bool = False) -> None:
    build(metaspace).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
