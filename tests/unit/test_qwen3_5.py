"""Qwen3.5's checkpoints: the text part of multimodal ones, and configs that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import SamplingParams
from stoop.config.errors import CheckpointError
from stoop.core.quantized import QuantizedRows
from stoop.models.registry import read_model_spec
from support.checkpoints import CheckpointStore, as_multimodal
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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"linear_num_value_heads": 3}, "3 linear value heads, which 2 key heads do not divide"),
        ({"attn_output_gate": False}, "attn_output_gate=false is not supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.03}}, "an even number of dimensions"),
        ({"rope_parameters": {"partial_rotary_factor": "all"}}, "an even number of dimensions"),
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
