"""Converting GGUF files: tensors, config and tokenizer, on tiny files made here."""

import json
import logging
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from stoop.checkpoint import gguf as converter
from stoop.checkpoint.gguf import convert_gguf, converted_bytes
from stoop.checkpoint.gguf_tokenizer import build_tokenizer
from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError
from support.gguf_files import (
    FEED_FORWARD,
    HEAD_DIM,
    HIDDEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    SPM_PIECES,
    TOKENS,
    Tensors,
    random_tensors,
    spm_fields,
    write_gguf,
)


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def assert_same(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    with WeightReader(folder) as reader:
        assert reader.names() == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(reader.tensor(name).float(), torch.from_numpy(tensor)), name


@pytest.mark.parametrize("bias", [False, True])
def test_llama_tensors_come_back_in_their_own_order(tmp_path: Path, bias: bool) -> None:
    tensors = random_tensors(bias=bias)
    convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "out")
    assert_same(tmp_path / "out", tensors)
    assert read_json(tmp_path / "out" / "config.json")["attention_bias"] is bias


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_tensors_are_not_reordered(tmp_path: Path, architecture: str) -> None:
    is_qwen2 = architecture == "qwen2"
    tensors = random_tensors(bias=is_qwen2, head_norms=not is_qwen2, head=True)
    convert_gguf(write_gguf(tmp_path / "m.gguf", tensors, architecture), tmp_path / "out")
    assert_same(tmp_path / "out", tensors)
    config = read_json(tmp_path / "out" / "config.json")
    assert config["architectures"] == [f"{architecture.capitalize()}ForCausalLM"]
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "Q5_0"])
def test_quantised_tensors_become_their_float32_values(tmp_path: Path, kind: str) -> None:
    tensors = random_tensors()
    kind_code = gguf.GGMLQuantizationType[kind]
    convert_gguf(write_gguf(tmp_path / "m.gguf", tensors, kind=kind_code), tmp_path / "out")
    expected = {
        name: gguf.quants.dequantize(gguf.quants.quantize(tensor, kind_code), kind_code)
        if tensor.ndim == 2
        else tensor
        for name, tensor in tensors.items()
    }
    assert_same(tmp_path / "out", expected)


def test_slices_join_to_the_same_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_tensors(), kind=gguf.GGMLQuantizationType.Q8_0)
    convert_gguf(source, tmp_path / "whole")
    monkeypatch.setattr(converter, "SLICE_ELEMENTS", 3 * HIDDEN)
    convert_gguf(source, tmp_path / "sliced")
    name = "model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "sliced" / name).read_bytes()


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_half_types_are_kept(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    tensors = random_tensors()
    source = write_gguf(tmp_path / "m.gguf", tensors, kind=gguf.GGMLQuantizationType[kind])
    convert_gguf(source, tmp_path / "out")
    with WeightReader(tmp_path / "out") as reader:
        name = "model.layers.1.self_attn.k_proj.weight"
        assert torch.equal(reader.tensor(name), torch.from_numpy(tensors[name]).to(dtype))
        assert reader.tensor("model.norm.weight").dtype == torch.float32
    config = read_json(tmp_path / "out" / "config.json")
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_large_quantised_models_become_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_tensors(), kind=gguf.GGMLQuantizationType.Q8_0)
    convert_gguf(source, tmp_path / "wide")
    monkeypatch.setattr(converter, "MAX_FLOAT32_BYTES", 1000)
    with caplog.at_level(logging.INFO):
        convert_gguf(source, tmp_path / "narrow")
    assert "stored in bfloat16" in caplog.text
    name = "model.layers.0.mlp.up_proj.weight"
    wide, narrow = (WeightReader(tmp_path / folder).tensor(name) for folder in ("wide", "narrow"))
    assert torch.equal(wide.bfloat16(), narrow)


def test_config_and_size_are_told(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_tensors())
    told: list[tuple[str, int, int | None]] = []
    convert_gguf(source, tmp_path / "out", lambda *step: told.append(step))
    config = read_json(tmp_path / "out" / "config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": len(TOKENS),
        "tie_word_embeddings": True,
        "sliding_window": None,
        "eos_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected
    total = converted_bytes(source)
    assert told[0] == ("converting", 0, total)
    assert told[-1] == ("converting", total, total)
    assert WeightReader(tmp_path / "out").total_bytes == total


def test_rope_factors_go_into_the_config(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, HEAD_DIM // 2, dtype=np.float32)
    source = write_gguf(
        tmp_path / "m.gguf",
        random_tensors(),
        more=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    convert_gguf(source, tmp_path / "out")
    config = read_json(tmp_path / "out" / "config.json")
    assert config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
    assert "rope_freqs.weight" not in WeightReader(tmp_path / "out").names()


def add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def add_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


@pytest.mark.parametrize(
    ("add", "expected"),
    [
        (add_linear, {"rope_type": "linear", "factor": 2.0}),
        (
            add_yarn,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_translated(
    tmp_path: Path, add: Callable[[gguf.GGUFWriter], None], expected: dict[str, Any]
) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_tensors(), more=add)
    convert_gguf(source, tmp_path / "out")
    assert read_json(tmp_path / "out" / "config.json")["rope_scaling"] == expected


def test_a_sliding_window_makes_it_mistral(tmp_path: Path) -> None:
    source = write_gguf(
        tmp_path / "m.gguf", random_tensors(), more=lambda writer: writer.add_sliding_window(64)
    )
    convert_gguf(source, tmp_path / "out")
    config = read_json(tmp_path / "out" / "config.json")
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 64


def test_every_end_of_turn_is_an_end(tmp_path: Path) -> None:
    source = write_gguf(
        tmp_path / "m.gguf", random_tensors(), more=lambda writer: writer.add_eot_token_id(2)
    )
    convert_gguf(source, tmp_path / "out")
    assert read_json(tmp_path / "out" / "generation_config.json")["eos_token_id"] == [1, 2]


def test_tokenizer_and_template_are_written(tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "m.gguf", random_tensors()), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = tokenizer.encode("<|bos|>ab<user>12").ids
    assert [tokenizer.id_to_token(token_id) for token_id in ids] == [
        "<|bos|>", "ab", "<user>", "1", "2",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "ab<user>12"
    settings = read_json(tmp_path / "out" / "tokenizer_config.json")
    assert settings["eos_token"] == "<|eos|>"
    assert settings["add_bos_token"] is False
    assert settings["chat_template"] == "{{ messages[0].content }}"


def byte_level_fields(rule: str, tokens: list[str], **more: Any) -> dict[str, Any]:
    fields = {"model": "gpt2", "pre": rule, "tokens": tokens, "merges": [], **more}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["I", "'m", "Ġ", "Ġ1234"]),
        ("smollm", ["I", "'m", "ĠĠ", "1", "2", "3", "4"]),
        ("llama-bpe", ["I", "'m", "Ġ", "Ġ", "123", "4"]),
        ("qwen2", ["I", "'m", "Ġ", "Ġ", "1", "2", "3", "4"]),
        ("tekken", ["I", "'m", "Ġ", "Ġ", "1", "2", "3", "4"]),
        ("default", ["I", "'", "m", "Ġ", "Ġ", "123", "4"]),
    ],
)
def test_each_rule_cuts_text_its_own_way(rule: str, pieces: list[str]) -> None:
    tokenizer = build_tokenizer(byte_level_fields(rule, list("I'mĠ1234")))
    assert tokenizer.pre_tokenizer is not None
    cut = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'm  1234")]
    assert cut == pieces


def test_llama3_takes_whole_words_and_begins_with_bos() -> None:
    tokens = ["<bos>", "a", "b", "c", "abc"]
    fields = byte_level_fields("llama-bpe", tokens, token_type=[3, 1, 1, 1, 1], bos_token_id=0)
    assert build_tokenizer(fields).encode("abc").ids == [0, 4]


def sentencepiece(text: str) -> list[str]:
    """SentencePiece's own rule: merge the best-scoring neighbours, leftmost first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        known = [piece for piece in joined if piece in SPM_PIECES]
        if not known:
            return pieces
        position = joined.index(max(known, key=lambda piece: SPM_PIECES[piece]))
        pieces[position : position + 2] = [joined[position]]


@pytest.mark.parametrize("text", ["hello world", "hello", "world  hello", "llold", "hhello ello"])
def test_sentencepiece_merges_by_score(text: str) -> None:
    tokenizer = build_tokenizer(spm_fields())
    encoding = tokenizer.encode(text)
    assert encoding.tokens == ["<s>", *sentencepiece(text)]
    assert tokenizer.decode(encoding.ids) == text


def test_sentencepiece_falls_back_on_bytes() -> None:
    tokenizer = build_tokenizer(spm_fields())
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("é\n").ids) == "é\n"


def test_sentencepiece_can_do_without_the_leading_space() -> None:
    tokenizer = build_tokenizer(spm_fields(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("hel").tokens == ["hel"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "model 'bert' cannot be loaded"),
        ({"scores": [1.0]}, "no score for each token"),
        ({"tokens": []}, "holds no tokenizer"),
        ({"token_type": [1]}, "more tokens than token types"),
        ({"model": "gpt2", "pre": "klingon"}, "pre-tokenizer 'klingon' cannot be loaded"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["ab"]}, "broken merge 'ab'"),
    ],
)
def test_unknown_tokenizers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(spm_fields(**changes))


def assert_refused(path: Path, tensors: Tensors, message: str, **options: Any) -> None:
    source = write_gguf(path / "m.gguf", tensors, **options)
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(source, path / "out")
    assert not (path / "out").exists()


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    assert_refused(
        tmp_path, random_tensors(), "architecture 'falcon'.*llama", architecture="falcon"
    )


def test_experts_are_refused(tmp_path: Path) -> None:
    message = "mixture-of-experts"
    assert_refused(
        tmp_path, random_tensors(), message, more=lambda writer: writer.add_expert_count(8)
    )


def test_partial_rotation_is_refused(tmp_path: Path) -> None:
    message = f"rotates 8 of {HEAD_DIM} dimensions"
    assert_refused(
        tmp_path,
        random_tensors(),
        message,
        more=lambda writer: writer.add_rope_dimension_count(8),
    )


def test_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    assert_refused(
        tmp_path,
        random_tensors(),
        "scaling of kind 'longrope'",
        more=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
    )


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    extra = np.zeros(4, dtype=np.float32)
    assert_refused(
        tmp_path,
        random_tensors(),
        "tensor 'blk.0.mystery.weight'",
        more=lambda writer: writer.add_tensor("blk.0.mystery.weight", extra),
    )


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    assert_refused(tmp_path, tensors, "lacks the tensor 'blk.1.ffn_up.weight'.*merge")


def test_no_beginning_of_a_file_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", random_tensors()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 10, 30, 200, 900, 2000, 4000, len(data) // 2, len(data) - 100]:
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"is not a whole GGUF file .*download it again"):
            convert_gguf(cut, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_never_shows_as_anything_but_a_checkpoint_error(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", random_tensors()).read_bytes()
    generator = np.random.default_rng(1)
    damaged_file = tmp_path / "damaged.gguf"
    messages: list[str] = []
    for _ in range(150):
        damaged = bytearray(data)
        position = int(generator.integers(4, 2500))
        damaged[position] ^= 1 << int(generator.integers(8))
        damaged_file.write_bytes(bytes(damaged))
        try:
            convert_gguf(damaged_file, tmp_path / "out")
        except CheckpointError as error:
            messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"PK\x03\x04 a zip", "does not begin with the letters GGUF"), (b"", "does not begin")],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")
