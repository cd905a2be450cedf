"""Qwen3.5's checkpoints: the text part of multimodal ones, and configs that are refused."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from stoop import SamplingParams
from stoop.config.errors import CheckpointError
from stoop.core.quantized import QuantizedRows
from stoop.models.registry import read_model_spec
from support.checkpoints import (
    ARCHITECTURES,
    CheckpointStore,
    as_multimodal,
    draw_parameter,
    edit_json,
)
from support.engines import generate_ids, make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 3], list(range(40))]
SETTINGS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}


@pytest.fixture
def text(checkpoints: CheckpointStore) -> Path:
    return checkpoints.get("qwen3.5", dtype="float64")


def test_the_text_part_of_a_multimodal_checkpoint_is_loaded(text: Path, tmp_path: Path) -> None:
    whole = as_multimodal(text, tmp_path / "whole")
    expected = generate_ids(make_llm(text, **SETTINGS), PROMPTS, GREEDY)
    assert generate_ids(make_llm(whole, **SETTINGS), PROMPTS, GREEDY) == expected
    assert read_model_spec(whole).eos_token_ids == read_model_spec(text).eos_token_ids == (2,)


def test_stored_names_decide_whatever_the_architecture_is_called(
    text: Path, tmp_path: Path
) -> None:
    whole = as_multimodal(text, tmp_path / "whole")
    expected = generate_ids(make_llm(text, **SETTINGS), PROMPTS, GREEDY)
    for config, weights in ((text, whole), (whole, text)):
        folder = tmp_path / f"{config.name}-{weights.name}"
        folder.mkdir()
        shutil.copy(config / "config.json", folder)
        shutil.copy(weights / "model.safetensors", folder)
        assert generate_ids(make_llm(folder, **SETTINGS), PROMPTS, GREEDY) == expected
    tensors = load_file(whole / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, whole / "model.safetensors")
    with pytest.raises(CheckpointError, match="has one tensor under two names, 'model"):
        make_llm(whole, **SETTINGS)


VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 4}
VISION |= {"out_hidden_size": 64, "num_position_embeddings": 16}
TIED = "tie_word_embeddings"


def answers(model: PreTrainedModel) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def multimodal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bool]:
    """As transformers saves it, and whether its embedding is its LM head."""
    tied: bool = request.param
    folder = tmp_path_factory.mktemp("multimodal")
    text = ARCHITECTURES["qwen3.5"].config().to_dict()
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    model = Qwen3_5ForConditionalGeneration(config).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw_parameter(name, parameter, generator, tied)
            if "norm" in name and "linear_attn" not in name:
                parameter.sub_(1.0)  # these norms multiply by 1 + weight
    model.save_pretrained(folder)
    return folder, tied


def test_a_multimodal_checkpoint_that_was_saved_again_as_text(
    multimodal: tuple[Path, bool], tmp_path: Path
) -> None:
    """transformers calls it Qwen3_5ForCausalLM, and keeps the multimodal names of tensors."""
    folder, tied = multimodal
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    config = json.loads((whole / "config.json").read_text())
    edit_json(whole / "config.json", text_config=config["text_config"] | {TIED: tied})
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float64)
    model.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    names = load_file(tmp_path / "again" / "model.safetensors").keys()
    assert "model.language_model.norm.weight" in names and ("lm_head.weight" in names) != tied
    llm = make_llm(tmp_path / "again", **SETTINGS)
    assert generate_ids(llm, PROMPTS, GREEDY) == answers(model)


@pytest.mark.parametrize("inner", [True, False, None])
@pytest.mark.parametrize("outer", [True, False, None])
def test_the_flag_outside_the_text_part_ties(
    multimodal: tuple[Path, bool], tmp_path: Path, outer: bool | None, inner: bool | None
) -> None:
    """Without it, weights without an LM head are tied if the text's flag says so."""
    source, tied = multimodal
    folder = tmp_path / "changed"
    shutil.copytree(source, folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text = {key: value for key, value in text.items() if key != TIED}
    text |= {} if inner is None else {TIED: inner}
    edit_json(folder / "config.json", text_config=text, **{TIED: outer})
    ties = outer or (outer is None and tied and bool(inner))
    if tied and not ties:
        with pytest.raises(CheckpointError, match=r"the checkpoint lacks lm_head\.weight"):
            make_llm(folder, **SETTINGS)
    elif ties == tied:
        # transformers would make up an LM head if the flag outside were absent.
        sound = source if tied and outer is None else folder
        model = Qwen3_5ForConditionalGeneration.from_pretrained(sound, dtype=torch.float64)
        assert generate_ids(make_llm(folder, **SETTINGS), PROMPTS, GREEDY) == answers(model)
    else:
        assert read_model_spec(folder).tie_word_embeddings  # type: ignore[attr-defined]


def test_without_weights_the_flag_of_the_text_part_ties(
    multimodal: tuple[Path, bool], tmp_path: Path
) -> None:
    config = json.loads((multimodal[0] / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != TIED}
    for inner in (True, False):
        changed = config | {"text_config": config["text_config"] | {TIED: inner}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        spec = read_model_spec(tmp_path)
        assert spec.tie_word_embeddings == inner  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"linear_num_value_heads": 3}, "3 linear value heads, which 2 key heads do not divide"),
        ({"attn_output_gate": False}, "attn_output_gate=false is not supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported"),
        ({"attn_output_gate": "no"}, "attn_output_gate='no' where true or false is needed"),
        ({"rope_parameters": {"partial_rotary_factor": 0.03}}, "rotates 0 of 32 dimensions"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "an even number from 2 to 32"),
        ({"rope_parameters": {"partial_rotary_factor": "all"}}, "'all' where a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": math.inf}}, "inf where a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": math.nan}}, "nan where a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": True}}, "True where a positive number"),
        ({"layer_types": ["linear_attention"]}, "1 layer_types for 4 layers"),
        ({"layer_types": ["mamba"] * 4}, "'mamba' among its layer_types"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_config_that_makes_no_sense_is_refused(
    text: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    config = json.loads((text / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=sentence) as refused:
        read_model_spec(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_multimodal_config_without_a_text_part_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="text_config=None where an object is needed"):
        read_model_spec(tmp_path)


def test_layers_follow_the_interval_if_none_are_listed(text: Path, tmp_path: Path) -> None:
    config = json.loads((text / "config.json").read_text()) | {"layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config | {"full_attention_interval": 2}))
    kinds = read_model_spec(tmp_path).layer_types  # type: ignore[attr-defined]
    assert kinds == ("linear_attention", "full_attention") * 2


def test_rows_of_quantised_blocks_can_be_reordered() -> None:
    rows = QuantizedRows("Q8_0", torch.arange(3 * 34).view(3, 34))
    assert torch.equal(rows.taken(torch.tensor([2, 0])).data, rows.data[[2, 0]])
