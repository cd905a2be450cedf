"""Every way in which transformers writes a checkpoint loads to the same model."""

import json

import pytest
import torch

from stoop.models.registry import read_model_spec
from support.checkpoints import (
    PLAIN,
    WINDOW,
    CheckpointStore,
    copy_with_old_config,
    edit_json,
    save_checkpoint,
)
from support.engines import MakeEngine
from support.huggingface import (
    TIE_GAPS,
    HuggingFace,
    ReferenceStore,
    make_prompt,
    mismatches,
    run_greedy,
)

PROMPTS = [make_prompt(length) for length in (1, 33, 150)]

every_architecture = pytest.mark.parametrize("name", PLAIN)


@pytest.mark.parametrize("rope_type_key", ["rope_type", "type"])
@every_architecture
def test_old_config_means_the_same(
    checkpoints: CheckpointStore, references: ReferenceStore, name: str, rope_type_key: str
) -> None:
    """transformers 4 and 5 lay config.json out differently; transformers itself reads both."""
    new = checkpoints.get(name)
    old = copy_with_old_config(new, checkpoints.scratch(name), rope_type_key)
    config = json.loads((old / "config.json").read_text())
    assert not {"rope_parameters", "dtype", "layer_types"} & config.keys()
    assert read_model_spec(old) == read_model_spec(new)
    logits = HuggingFace(old, "float32").forward(PROMPTS[1])
    assert torch.equal(logits, references.get(name).forward(PROMPTS[1]))


@every_architecture
def test_old_config_answers_the_same(
    checkpoints: CheckpointStore, references: ReferenceStore, make_engine: MakeEngine, name: str
) -> None:
    old = copy_with_old_config(checkpoints.get(name), checkpoints.scratch(name))
    wanted = [references.get(name).greedy(prompt, 12) for prompt in PROMPTS]
    found = run_greedy(make_engine(old, max_model_len=256), PROMPTS, 12)
    assert mismatches(found, wanted, TIE_GAPS["float32"]) == []


@pytest.mark.parametrize("name", ["llama2", "smollm2", "qwen3"])
def test_sharded_checkpoint(
    checkpoints: CheckpointStore, references: ReferenceStore, make_engine: MakeEngine, name: str
) -> None:
    folder = save_checkpoint(checkpoints.scratch(name), name, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert len(list(folder.glob("*.safetensors"))) > 2
    wanted = [references.get(name).greedy(prompt, 12) for prompt in PROMPTS]
    found = run_greedy(make_engine(folder, max_model_len=256), PROMPTS, 12)
    assert mismatches(found, wanted, TIE_GAPS["float32"]) == []


@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16", "float16"])
def test_stored_dtype_is_converted(
    checkpoints: CheckpointStore, make_engine: MakeEngine, stored: str
) -> None:
    """A checkpoint of one dtype, run in another, as transformers converts it."""
    folder = checkpoints.get("qwen2", 0, stored)
    model = HuggingFace(folder, "float32")
    wanted = [model.greedy(prompt, 12) for prompt in PROMPTS]
    llm = make_engine(folder, dtype="float32", max_model_len=256)
    assert llm.config.model.dtype == stored
    assert mismatches(run_greedy(llm, PROMPTS, 12), wanted, TIE_GAPS["float32"]) == []


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama2", (None, None, None)),
        ("mistral", (WINDOW, WINDOW, WINDOW)),
        ("mistral-full", (None, None, None)),
        ("qwen2", (None, None, None)),
        ("qwen2-window", (None, WINDOW, WINDOW)),
        ("qwen3-window", (None, None, WINDOW)),
    ],
)
def test_windows_by_layer(
    checkpoints: CheckpointStore, name: str, windows: tuple[int | None, ...]
) -> None:
    assert read_model_spec(checkpoints.get(name)).windows == windows


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
        YARN | {"attention_factor": 0.8},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        YARN | {"truncate": False},
        {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"},
        {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 256,
        },
    ],
    ids=["theta", "yarn-betas", "yarn-factor", "yarn-mscale", "yarn-smooth", "yarn-bare", "llama3"],
)
def test_rope_parameters(
    checkpoints: CheckpointStore, make_engine: MakeEngine, rope: dict[str, object]
) -> None:
    """Every parameter of the rotary scaling that transformers honours."""
    folder = save_checkpoint(checkpoints.scratch("rope"), "llama2")
    edit_json(folder / "config.json", rope_parameters=rope)
    model = HuggingFace(folder, "float32")
    prompts = [make_prompt(length) for length in (33, 300)]
    wanted = [model.greedy(prompt, 12) for prompt in prompts]
    found = run_greedy(make_engine(folder, max_model_len=320), prompts, 12)
    assert mismatches(found, wanted, TIE_GAPS["float32"]) == []


@pytest.mark.parametrize(
    ("name", "key", "field"),
    [
        ("mistral", "sliding_window", "windows"),
        ("llama2", "rms_norm_eps", "rms_norm_eps"),
        ("qwen2", "rms_norm_eps", "rms_norm_eps"),
    ],
)
def test_an_absent_key_means_what_transformers_assumes(
    checkpoints: CheckpointStore, name: str, key: str, field: str
) -> None:
    folder = save_checkpoint(checkpoints.scratch("absent"), name)
    edit_json(folder / "config.json", **{key: None})
    assumed = getattr(HuggingFace(folder, "float32").model.config, key)
    found = getattr(read_model_spec(folder), field)
    assert found == ((assumed,) * 3 if field == "windows" else assumed)


def test_llama3_scaling_may_state_its_original_length_beside_it(
    checkpoints: CheckpointStore,
) -> None:
    folder = save_checkpoint(checkpoints.scratch("llama3"), "llama3")
    expected = read_model_spec(folder)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    original = rope.pop("original_max_position_embeddings")
    edit_json(
        folder / "config.json", rope_parameters=rope, original_max_position_embeddings=original
    )
    assert read_model_spec(folder) == expected


def test_yarn_reaches_beyond_the_length_that_it_stretches(checkpoints: CheckpointStore) -> None:
    folder = save_checkpoint(checkpoints.scratch("yarn"), "llama2")
    edit_json(folder / "config.json", rope_parameters=YARN, max_position_embeddings=128)
    assert read_model_spec(folder).max_position == 512


def test_other_architectures_ignore_mlp_bias(checkpoints: CheckpointStore) -> None:
    folder = save_checkpoint(checkpoints.scratch("mlp"), "qwen2")
    edit_json(folder / "config.json", mlp_bias=True)
    assert not read_model_spec(folder).mlp_bias
