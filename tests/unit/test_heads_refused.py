"""Draft heads that do not fit, dummy heads and pickled ones."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoop.checkpoint.weights import WeightReader
from stoop.config.errors import CheckpointError, ConfigError
from stoop.config.schema import DeviceConfig
from stoop.models.eagle import EagleSpec
from stoop.models.head_config import read_head_spec
from stoop.models.head_loader import load_head
from support.head_layouts import (
    DIM,
    DRAFT,
    DRAFTING,
    EAGLE1,
    EAGLE3,
    LAYER_CONFIG,
    SIZE,
    TAPS,
    TARGET,
    VOCAB,
    Config,
    Tensors,
    eagle3,
    flat,
    load,
    make_target,
    make_tensors,
    speculators,
    write,
)

# What is done to a good head of EAGLE-3 with d2t, and the sentence that refuses it.
Harm = Callable[[Config, Tensors], object]
EAGLE3_HARMS: dict[str, tuple[Harm, str]] = {
    "target_hidden_size": (
        lambda c, t: c.update(target_hidden_size=64),
        "target with hidden_size 64, but this one has 32",
    ),
    "taps of fc": (
        lambda c, t: c.update({TAPS: [1, 2]}),
        "takes 96 values, but 2 taps (from config) of the target's hidden_size 32 make 64",
    ),
    "fc of another target": (
        lambda c, t: t.update({"fc.weight": torch.zeros(SIZE, 3 * 16)}),
        "takes 48 values, but 3 taps (from default) of the target's hidden_size 32 make 96",
    ),
    "tap out of range": (
        lambda c, t: c.update({TAPS: [1, 2, 7]}),
        "taps layer 7, but the target has 6 layers and taps from 0 to 6",
    ),
    "negative tap": (lambda c, t: c.update({TAPS: [-1, 2, 3]}), "taps layer -1, but the target"),
    "no list of taps": (lambda c, t: c.update({TAPS: 3}), f"{TAPS}=3 where a list"),
    "no taps": (lambda c, t: c.update({TAPS: []}), f"{TAPS}=[] where a list"),
    "two lists of taps": (
        lambda c, t: c.update({TAPS: [1, 2, 3], "eagle_config": {TAPS: [1, 2, 4]}}),
        "[1, 2, 3] and, in eagle_config, [1, 2, 4]: keep the one",
    ),
    "no aux states": (
        lambda c, t: c.update(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state=False",
    ),
    "eagle_config of another kind": (
        lambda c, t: c.update(eagle_config=[1]),
        "eagle_config=[1] where an object is needed",
    ),
    "size of a shared embedding": (
        lambda c, t: c.update(hidden_size=48, head_dim=DIM),
        "hidden_size 48 and the target 32, but they must be equal for a head that uses "
        "the target's embed_tokens:",
    ),
    "rows of the embedding": (
        lambda c, t: t.update({"embed_tokens.weight": torch.zeros(50, SIZE)}),
        "embed_tokens.weight has 50 rows, but the target's vocabulary has 40 tokens",
    ),
    "rows of lm_head": (
        lambda c, t: t.update({"lm_head.weight": torch.zeros(20, SIZE)}),
        "lm_head.weight has 20 rows, but it drafts 24 tokens",
    ),
    "vocabulary of the target": (
        lambda c, t: c.update(vocab_size=41),
        "vocabulary of 41 tokens, but the target has 40",
    ),
    "more drafts than tokens": (
        lambda c, t: c.update(draft_vocab_size=41),
        "drafts 41 tokens, but the target has only 40",
    ),
    "no d2t": (
        lambda c, t: t.pop("d2t"),
        "drafts 24 of the target's 40 tokens but has no d2t",
    ),
    "length of d2t": (
        lambda c, t: t.update(d2t=torch.zeros(23, dtype=torch.int64)),
        "d2t has shape [23], but draft_vocab_size is 24",
    ),
    "no lm_head": (
        lambda c, t: t.pop("lm_head.weight"),
        "24 of the target's 40 tokens through d2t but has no lm_head.weight",
    ),
    "tied, with fewer drafts": (
        lambda c, t: (
            t.pop("lm_head.weight"),
            t.update({"embed_tokens.weight": torch.zeros(VOCAB, SIZE)}),
            c.update(tie_word_embeddings=True),
        ),
        "has 40 rows, but it drafts 24 tokens",
    ),
    "missing tensor": (
        lambda c, t: t.pop("layers.0.mlp.up_proj.weight"),
        "the draft head lacks layers.0.mlp.up_proj.weight",
    ),
    "no fc": (lambda c, t: t.pop("fc.weight"), "the draft head lacks fc.weight"),
    "unknown tensor": (
        lambda c, t: t.update(mask_hidden=torch.zeros(3)),
        "the draft head has mask_hidden, which config.json does not account for",
    ),
    "shape": (
        lambda c, t: t.update({"norm.weight": torch.zeros(31)}),
        "tensor norm.weight has shape [31] where config.json asks for [32]",
    ),
    "layers": (
        lambda c, t: c.update(num_hidden_layers=6),
        "num_hidden_layers=6, but the head's weights have 1 layers",
    ),
    "norm_before_fc without its norm": (
        lambda c, t: c.update(norm_before_fc=True),
        "norm_before_fc=True, but the weights lack input_norm.weight",
    ),
    "norm_before_fc denied": (
        lambda c, t: (
            c.update(eagle_config={"norm_before_fc": False}),
            t.update({"input_norm.weight": torch.zeros(96)}),
        ),
        "norm_before_fc=False, but the weights have input_norm.weight",
    ),
    "fc_norm without its norms": (
        lambda c, t: c.update(fc_norm=True),
        "fc_norm=True, but the weights lack fc_norm.0.weight",
    ),
    "too few of fc_norm": (
        lambda c, t: t.update({"fc_norm.0.weight": torch.zeros(SIZE)}),
        "lacks fc_norm.1.weight and 1 more tensors",
    ),
    "a flag that is none": (
        lambda c, t: c.update(norm_output="yes"),
        "norm_output='yes' where true or false",
    ),
    "flags that differ": (
        lambda c, t: c.update(norm_output=True, eagle_config={"norm_output": False}),
        "norm_output=True and, in eagle_config, False",
    ),
    "an EAGLE-1 name": (
        lambda c, t: c.update(architectures=["LlamaForCausalLMEagle"]),
        "names method 'eagle', but the weights are of 'eagle3' (its weights have layers.0",
    ),
    "another architecture": (
        lambda c, t: c.update(architectures=["GptOssForCausalLMEagle3"]),
        "architecture is GptOssForCausalLMEagle3: stoop loads EAGLE heads",
    ),
    "quantised": (
        lambda c, t: c.update(quantization_config={"quant_method": "fp8"}),
        "quantised (fp8)",
    ),
}

EAGLE1_HARMS: dict[str, tuple[Harm, str]] = {
    "size": (
        lambda c, t: c.update(hidden_size=48, head_dim=DIM),
        "hidden_size 48 and the target 32, but they must be equal for a head that uses "
        "the target's embed_tokens and lm_head",
    ),
    "size with its own ends": (
        lambda c, t: (
            c.update(hidden_size=48, head_dim=DIM),
            t.update({"embed_tokens.weight": torch.zeros(VOCAB, 48)}),
            t.update({"lm_head.weight": torch.zeros(VOCAB, 48)}),
        ),
        "hidden_size 48 and the target 32, but they must be equal for a head that is EAGLE-1",
    ),
    "lm_head": (
        lambda c, t: t.update({"lm_head.weight": torch.zeros(39, SIZE)}),
        "lm_head.weight has 39 rows, but it drafts 40 tokens",
    ),
    "fc": (
        lambda c, t: t.update({"fc.weight": torch.zeros(SIZE, 48)}),
        "tensor fc.weight has shape [32, 48] where config.json asks for [32, 64]",
    ),
    "an input norm": (
        lambda c, t: t.update({"layers.0.input_layernorm.weight": torch.zeros(SIZE)}),
        "the draft head has layers.0.input_layernorm.weight",
    ),
    "a flag of EAGLE-3": (
        lambda c, t: c.update(norm_output=True),
        "norm_output=True, but the head is EAGLE-1",
    ),
    "taps": (
        lambda c, t: c.update({TAPS: [1, 2, 3]}),
        f"{TAPS}=[1, 2, 3], but the head is EAGLE-1",
    ),
    "an EAGLE-3 name": (
        lambda c, t: c.update(architectures=["LlamaForCausalLMEagle3"]),
        "names method 'eagle3', but the weights are of 'eagle' (its weights lack layers",
    ),
    "no weights of a head": (
        lambda c, t: (t.clear(), t.update({"lm_head.weight": torch.zeros(VOCAB, SIZE)})),
        "num_hidden_layers=1, but the head's weights have 0 layers",
    ),
}

SPECULATORS_HARMS: dict[str, tuple[Harm, str]] = {
    "layernorms": (lambda c, t: c.update(layernorms=True), "layernorms=True"),
    "fusion_bias": (
        lambda c, t: c.update(fusion_bias=True),
        "fusion_bias=True, but the weights lack fc.bias",
    ),
    "another method": (
        lambda c, t: c.update(speculators_model_type="mtp"),
        "speculators_model_type is 'mtp': stoop loads eagle, eagle3",
    ),
    "other layers": (
        lambda c, t: c.update(transformer_layer_config={**LAYER_CONFIG, "model_type": "gemma"}),
        "model_type 'gemma': stoop loads llama, mistral, qwen2, qwen3",
    ),
    "no layers": (
        lambda c, t: c.pop("transformer_layer_config"),
        "the speculators layout but no transformer_layer_config",
    ),
}

HARMS = {
    f"{kind}: {name}": (kind, harm, sentence)
    for kind, harms in (
        ("eagle3", EAGLE3_HARMS),
        ("eagle", EAGLE1_HARMS),
        ("speculators", SPECULATORS_HARMS),
    )
    for name, (harm, sentence) in harms.items()
}


@pytest.mark.parametrize(("kind", "harm", "sentence"), HARMS.values(), ids=HARMS)
def test_what_does_not_fit_is_refused(tmp_path: Path, kind: str, harm: Harm, sentence: str) -> None:
    config, spec = {
        "eagle3": (flat(draft_vocab_size=DRAFT), eagle3(decoder=DRAFTING, maps_vocabulary=True)),
        "eagle": (flat(), EAGLE1),
        "speculators": (speculators("eagle"), EAGLE1),
    }[kind]
    tensors = make_tensors(spec)
    write(tmp_path, config, tensors)
    assert read_head_spec(tmp_path, TARGET) == spec  # before it is harmed
    harm(config, tensors)
    write(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=re.escape(sentence)) as caught:
        read_head_spec(tmp_path, TARGET)
    assert ": " in str(caught.value) or "needed" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "asked"), [(EAGLE1, "eagle3"), (EAGLE3, "eagle")], ids=["eagle", "eagle3"]
)
def test_another_method_than_asked_is_refused(tmp_path: Path, spec: EagleSpec, asked: str) -> None:
    write(tmp_path, flat(), make_tensors(spec))
    sentence = f"method '{asked}' is asked for, but the head in {tmp_path} is '{spec.method}'"
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_head_spec(tmp_path, TARGET, method=asked)


def test_a_method_without_heads_is_refused(tmp_path: Path) -> None:
    write(tmp_path, flat(), make_tensors(EAGLE1))
    with pytest.raises(ConfigError, match="method 'ngram' has no head"):
        read_head_spec(tmp_path, TARGET, method="ngram")


@pytest.mark.parametrize(
    ("d2t", "sentence"),
    [
        (
            [0] * 23 + [17],
            "maps draft token 23 to token 40, but the target's tokens go from 0 to 39",
        ),
        ([0, -2] + [0] * 22, "maps draft token 1 to token -1, but"),
        ([0, 0, 0, 2] + [0] * 20, "maps both draft tokens 3 and 5 to token 5"),
        ([0.0] * 24, "d2t has dtype float32 where whole numbers are needed"),
    ],
)
def test_a_bad_d2t_is_refused(tmp_path: Path, d2t: list[Any], sentence: str) -> None:
    tensors = make_tensors(eagle3(decoder=DRAFTING, maps_vocabulary=True))
    tensors["d2t"] = torch.tensor(d2t)
    write(tmp_path, flat(draft_vocab_size=DRAFT), tensors)
    spec = read_head_spec(tmp_path, TARGET)
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, spec)


def test_the_last_token_may_be_drafted(tmp_path: Path) -> None:
    tensors = make_tensors(eagle3(decoder=DRAFTING, maps_vocabulary=True))
    tensors["d2t"] = torch.tensor([0] * 23 + [16], dtype=torch.int32)
    write(tmp_path, flat(draft_vocab_size=DRAFT), tensors)
    head = load(tmp_path, read_head_spec(tmp_path, TARGET))
    assert head.target_ids(torch.tensor([23])).tolist() == [VOCAB - 1]


def write_config(folder: Path, config: Config) -> None:
    (folder / "config.json").write_text(json.dumps(config))


DUMMIES = {
    "eagle3": (flat("LlamaForCausalLMEagle3"), None, EAGLE3),
    "eagle3 by its keys": (
        flat(draft_vocab_size=DRAFT, norm_before_fc=True, fc_norm=True),
        None,
        eagle3(decoder=DRAFTING, maps_vocabulary=True, norm_before_fc=True, fc_norms=True),
    ),
    "eagle3 as asked": (flat(), "eagle3", EAGLE3),
    "eagle as asked": (flat(), "eagle", EAGLE1),
    "eagle with a bias": (
        flat("LlamaForCausalLMEagle", bias=True),
        "eagle",
        dataclasses.replace(EAGLE1, fc_bias=True),
    ),
    "speculators": (speculators("eagle3", **{TAPS: [0, 6]}), "eagle3", eagle3(taps=(0, 6))),
}


@pytest.mark.parametrize(("config", "method", "spec"), DUMMIES.values(), ids=DUMMIES)
def test_a_dummy_needs_its_config_alone(
    tmp_path: Path, config: Config, method: str | None, spec: EagleSpec
) -> None:
    write_config(tmp_path, config)
    assert read_head_spec(tmp_path, TARGET, method, dummy=True) == spec
    target = make_target()
    heads = [
        load_head(
            spec,
            None,
            device=DeviceConfig.of("cpu", "float64"),
            target=target,
            num_positions=32,
            dummy_seed=seed,
        )
        for seed in (5, 5, 6)
    ]
    states = [head.fc.weight for head in heads]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert heads[0].first.post_attention_layernorm.weight.eq(1).all()
    assert heads[0].target_ids(torch.tensor([0, 23])).tolist() == [0, 23]
    if spec.fc_bias:
        assert heads[0].fc.bias.eq(0).all()


@pytest.mark.parametrize(
    ("config", "method", "error", "sentence"),
    [
        (flat(), None, ConfigError, "does not say whether the head is eagle or eagle3"),
        (
            flat(draft_vocab_size=9),
            "eagle",
            ConfigError,
            "is 'eagle3' .its config.json has draft_vocab",
        ),
        (flat("EagleLlamaForCausalLM"), "eagle3", ConfigError, "its config.json says so"),
        (flat(), "eagle4", ConfigError, "method 'eagle4' has no head"),
        (flat(hidden_size=64), "eagle3", CheckpointError, "hidden_size 64, but this one has 32"),
        (flat(vocab_size=9), "eagle", CheckpointError, "of 9 tokens, but the target has 40"),
    ],
)
def test_a_dummy_that_cannot_be_is_refused(
    tmp_path: Path, config: Config, method: str | None, error: type[Exception], sentence: str
) -> None:
    write_config(tmp_path, config)
    with pytest.raises(error, match=sentence):
        read_head_spec(tmp_path, TARGET, method, dummy=True)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_read_where_allowed(tmp_path: Path, zipped: bool) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    with WeightReader(tmp_path, allow_pickle=True) as reader:
        assert reader.names() == {"a", "b"}
        assert reader.shape("a") == (2, 3)
        assert reader.total_bytes == 6 * 4 + 4 * 8
        kept = reader.tensor("a")
        assert torch.equal(reader.tensor("b"), tensors["b"])
    assert torch.equal(kept, tensors["a"])
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        WeightReader(tmp_path)
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert WeightReader(tmp_path, allow_pickle=True).names() == {"c"}


class Code:
    """Something that a pickle would have to run code for."""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"a": Code()}, "more than tensors, which could run code when it is read: convert it"),
        ({"a": 3}, "has int 'a' among its tensors: convert it"),
        ([torch.ones(1)], "holds no tensors by name: convert it"),
    ],
)
def test_pickles_of_other_things_are_refused(
    tmp_path: Path, content: object, sentence: str
) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=sentence):
        WeightReader(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("kept", [0, 1, 300, -900])
def test_a_damaged_pickle_is_named(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2000)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is (truncated or )?damaged"):
        WeightReader(tmp_path, allow_pickle=True)


def test_taps_under_their_other_name(tmp_path: Path) -> None:
    """Some heads list their taps as `layer_ids`; two lists that differ are refused."""
    config = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLMEagle3"]}
    config |= {"eagle_config": {"layer_ids": [1, 2, 4]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_head_spec(tmp_path, TARGET, "eagle3", dummy=True).taps == (1, 2, 4)
    (tmp_path / "config.json").write_text(json.dumps({**config, TAPS: [1, 2, 3]}))
    with pytest.raises(CheckpointError, match=r"\[1, 2, 3\].*\[1, 2, 4\]"):
        read_head_spec(tmp_path, TARGET, "eagle3", dummy=True)
