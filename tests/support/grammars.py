"""A tiny model that can spell JSON, a drafter that knows what it will say, and random schemas."""

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from stoop import LLM, SamplingParams
from stoop.graph.buffers import Buffer, Extent, Lifetime
from stoop.graph.phases import Phase
from stoop.ops.drafting import commit_draft, draft_room
from stoop.spec.base import DraftSetup, Pass
from support.checkpoints import write_llama
from support.drafters import write_random_head
from support.engines import make_llm

VOCAB_SIZE = 330  # more than the tokenizer has: the rest must never be generated
MAX_LEN = 160
MERGES = [
    '{ "', '" :', '" ,', '} ,', "t r", "tr u", "tru e", "f a", "fa l", "fal s", "fals e", "n u",
    "nu l", "nul l", '": "', '", "', "1 2", "12 3", "Ġ {", "Ġ \"", "a b", "n a", "na m", "nam e",
    "] }", "} }", "Ã ©", "Ċ Ċ", '{" name', "< /", "</ t",
]  # fmt: skip


def write_model(folder: Path, **sizes: Any) -> Path:
    """A random Llama with a byte-level tokenizer whose tokens cross the borders of JSON."""
    tokenizer = build_tokenizer()
    eos = tokenizer.token_to_id("</s>")
    options = {"vocab_size": VOCAB_SIZE, "eos_token_id": eos, "initializer_range": 0.25}
    write_llama(folder, seed=1, **options | sizes)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def build_tokenizer() -> tokenizers.Tokenizer:
    vocab = {s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for each in MERGES:
        left, right = each.split(" ")
        vocab.setdefault(left + right, len(vocab))
        merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["</think>", "<tool>"])
    return tokenizer


def write_head(folder: Path) -> Path:
    sizes = {"vocab_size": VOCAB_SIZE, "draft_vocab_size": 300, "max_position_embeddings": 256}
    return write_random_head(folder, "eagle3", sizes)


class Oracle:
    """Drafts what it was told that a request will say. The request's first token names it.

    told: [names, max_model_len] int64, tokens by position
    """

    told = torch.zeros(VOCAB_SIZE, MAX_LEN, dtype=torch.int64)

    def __init__(self, setup: DraftSetup) -> None:
        assert setup.config.spec is not None
        self.setup = setup
        self.num_drafts = setup.config.spec.num_drafts
        self.max_model_len = setup.config.schedule.max_model_len
        device = setup.slots.token_ids.device
        Oracle.told = torch.zeros(VOCAB_SIZE, MAX_LEN, dtype=torch.int64, device=device)
        self.table = Oracle.told

    def phases(self) -> list[Phase]:
        reads = {"row_slots", "samples", "token_ids", "num_tokens", "num_drafts", "told"}
        limits = {"draft_limit", "token_limit"}
        return [Phase("O", self.draft, reads | limits, {"token_ids", "num_drafts"}, drafts=1)]

    def buffers(self) -> list[Buffer]:
        return [Buffer("told", self.table, Lifetime.CONSTANT, Extent.SCRATCH)]

    def draft(self, run: Pass) -> None:
        slots, step = self.setup.slots, self.setup.buffers.step
        room = draft_room(slots, step, self.max_model_len)
        name = slots.token_ids[step.row_slots, 0].long()
        for number in range(self.num_drafts):
            place = (slots.num_tokens[step.row_slots] + number).clamp(max=MAX_LEN - 1)
            commit_draft(slots, step, room, self.table[name, place])


def tell(prompts: list[list[int]], answers: list[list[int]], wrong: float, seed: int = 0) -> None:
    """Let the oracle know answers; some of its tokens are wrong, by chance."""
    source = random.Random(seed)
    for prompt, answer in zip(prompts, answers, strict=True):
        row = Oracle.told[prompt[0]]
        for place, token in enumerate(answer, start=len(prompt)):
            row[place] = source.randrange(VOCAB_SIZE) if source.random() < wrong else token


SETTINGS: dict[str, Any] = {
    "max_model_len": MAX_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 8,
    "num_kv_blocks": 96,
    "capture_sizes": "2,8,32",
}


def make_grammar_llm(folder: Path, **options: Any) -> LLM:
    return make_llm(folder, **SETTINGS | options)


# ---- random schemas ----


def random_schema(source: random.Random, depth: int = 2) -> Any:
    """A schema whose answers are short."""
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "null", "pattern", "types"]
    if depth:
        kinds += ["object", "array", "anyOf", "ref", "object", "array", "tuple", "map"]
    kind = source.choice(kinds)
    low = source.randrange(-30, 30)
    if kind == "string":
        return {"type": "string", "maxLength": source.randrange(1, 6)}
    if kind == "integer":
        return {"type": "integer", "minimum": low, "maximum": low + source.randrange(50)}
    if kind == "number":
        return {"type": "integer", "exclusiveMinimum": low, "maximum": low + 1 + low % 7}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "types":
        return {"type": ["boolean", "null"]}
    if kind == "enum":
        return {"enum": source.sample(["ab", "é", 1, 2.5, True, None, "name", [1], ""], 3)}
    if kind == "const":
        return {"const": source.choice(["a\nb", 7, False])}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": source.choice(["^[a-c]{2,4}$", "^x?\\d{3}$", "^(é|a)$"]),
        }
    below = depth - 1
    if kind == "anyOf":
        return {"anyOf": [random_schema(source, below) for _ in range(2)]}
    if kind == "ref":
        return {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1, "maxItems": 2}
    if kind == "array":
        most = source.randrange(1, 4)
        return {"type": "array", "items": random_schema(source, below), "maxItems": most}
    if kind == "tuple":
        parts = [random_schema(source, below) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
    if kind == "map":
        most = source.randrange(1, 3)
        names = {"type": "string", "pattern": "^[ab]{1,2}$"}
        inner = random_schema(source, below)
        return {
            "type": "object", "propertyNames": names, "additionalProperties": inner,
            "maxProperties": most,
        }  # fmt: skip
    names = source.sample(["name", "a", "ab", "é", "n"], source.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(source, below) for name in names},
        "required": [name for name in names if source.random() < 0.7],
    }


def whole_schema(source: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = random_schema(source)
    return schema | {"$defs": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}}


def schema_params(
    count: int, number: int, **options: Any
) -> tuple[list[Any], list[SamplingParams]]:
    source = random.Random(number)
    schemas = [whole_schema(source) for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=48,
            structured_outputs={"json": schema, "disable_any_whitespace": source.random() < 0.8},
            **{"temperature": 0} | options,
        )
        for schema in schemas
    ]
    return schemas, params
