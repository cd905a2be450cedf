"""Small files that claim to hold much: refused within little memory and time.

The files are read in a child whose memory is limited, so that a claim that is believed shows as a
MemoryError there rather than as a machine that stops.
"""

import json
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoop.checkpoint.gguf_file import GGUFFile
from stoop.checkpoint.gguf_tokenizer import build_tokenizer
from stoop.config.errors import CheckpointError
from support.gguf_files import random_tensors, spm_fields, write_gguf

LIMIT_BYTES = 2 << 30
READ = """
import sys
from pathlib import Path
from stoop.checkpoint.gguf import convert_gguf, converted_bytes
from stoop.checkpoint.gguf_layout import register_layout
from stoop.config.errors import CheckpointError
from stoop.models.decoder_gguf import decoder_config, decoder_layout
# As models/llama.py does; to import that brings torch, which takes too much memory itself.
config = lambda file: decoder_config(file, "LlamaForCausalLM", "llama")
register_layout(decoder_layout("llama", config, paired=True))
for name in sys.argv[1:]:
    for action in (converted_bytes, lambda path: convert_gguf(path, path.with_suffix(".out"))):
        try:
            action(Path(name))
            said = "taken"
        except CheckpointError as error:
            said = str(error)
    print(Path(name).stem, "|", said[:500].replace("\\n", " "))
"""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def header(num_tensors: int, num_fields: int, *rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + b"".join(rest)


ARCHITECTURE = field("general.architecture", 8, text("llama"))
HUGE = 1 << 60
SMALL_FILES: dict[str, tuple[bytes, str]] = {
    "layers": (
        header(0, 2, ARCHITECTURE, field("llama.block_count", 4, struct.pack("<I", 2**32 - 1))),
        "lacks the tensor",
    ),
    "fields": (header(0, HUGE, ARCHITECTURE), "more than it has bytes for"),
    "tensors": (header(HUGE, 1, ARCHITECTURE), "more than it has bytes for"),
    "array": (
        header(0, 1, field("a", 9, struct.pack("<IQ", 4, HUGE))),
        "more than it has bytes for",
    ),
    "strings": (
        header(0, 1, field("a", 9, struct.pack("<IQ", 8, HUGE))),
        "more than it has bytes for",
    ),
    "string": (header(0, 1, struct.pack("<Q", HUGE), bytes(20)), "ends within its header"),
    "dimensions": (
        header(1, 0, text("a"), struct.pack("<I", 2**31), bytes(200)),
        "has 2147483648 dimensions",
    ),
    "many-dimensions": (
        header(1, 0, text("a"), struct.pack("<I", 9000), struct.pack("<Q", 2**63) * 9000, bytes(9)),
        "has 9000 dimensions",
    ),
    "shape": (
        header(1, 0, text("a"), struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)),
        "ends before tensor a",
    ),
}


def long_token(kind: int) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        tokens = ["a", "b", "x" * 150_000]
        return write_spm(path, tokens, [1, 1, kind])

    return write


def chain(path: Path) -> Path:
    """Every token is all shorter ones in every way: a vocabulary of 2 MB, merges of gigabytes."""
    tokens = ["x" * size for size in range(1, 2000)]
    return write_spm(path, tokens, [1] * len(tokens))


def write_spm(path: Path, tokens: list[str], types: list[int]) -> Path:
    def add(writer: Any) -> None:
        for key in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_scores([0.0] * len(tokens))

    return write_gguf(path, random_tensors(), more=add)


def many_factors(path: Path) -> Path:
    factors = np.zeros(3_000_000, dtype=np.float32)
    return write_gguf(
        path, random_tensors(), more=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )


LARGER_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "long-token": (long_token(1), "a token of 150000 characters"),
    "long-control-token": (long_token(3), "taken"),
    "chain": (chain, "merged in far more ways"),
    "factors": (many_factors, "3000000 rotary factors"),
}


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))


def test_small_gguf_files_cannot_exhaust_memory(tmp_path: Path) -> None:
    expected = {}
    for name, (data, sentence) in SMALL_FILES.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
        expected[name] = sentence
    for name, (write, sentence) in LARGER_FILES.items():
        write(tmp_path / f"{name}.gguf")
        expected[name] = sentence
    assert (tmp_path / "layers.gguf").stat().st_size < 110
    files = [str(tmp_path / f"{name}.gguf") for name in expected]
    child = subprocess.run(
        [sys.executable, "-c", READ, *files],
        preexec_fn=limit_memory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    said = dict(line.split(" | ", 1) for line in child.stdout.splitlines())
    for name, sentence in expected.items():
        assert sentence in said[name], (name, said[name])
        assert len(said[name]) < 400


def test_tensors_may_not_share_their_bytes(tmp_path: Path) -> None:
    """Ten thousand headers over the same megabyte would be written out as ten gigabytes."""
    one = struct.pack("<IQIQ", 1, 4, 0, 0)
    for names, sentence in (
        (("a", "b"), "tensor b overlaps another"),
        (("a", "a"), "two tensors with the same name"),
    ):
        data = header(2, 0, *(text(name) + one for name in names))
        (tmp_path / "m.gguf").write_bytes(data.ljust(len(data) + 64, b"\0"))
        with pytest.raises(CheckpointError, match=sentence):
            GGUFFile(tmp_path / "m.gguf")


def test_merges_of_ordinary_vocabularies_stay_the_same() -> None:
    """Cuts are tried where pieces of both lengths exist; none may be lost by that."""
    fields = spm_fields()
    pieces = set(fields["tokenizer.ggml.tokens"][259:])
    made = json.loads(build_tokenizer(fields).to_str())["model"]["merges"]
    every = {
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    }
    assert {tuple(merge) for merge in made} == every
    assert len(made) == len(every)
