"""Models of a given shape: dummy weights that need no download, or a local checkpoint.

With drafts, the model gets an EAGLE-3 head with random weights, or uses its own MTP head, and none
of the drafts is accepted: a step yields one token per request at the full cost of drafting and
verification.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stoop.bench.shape_configs import EAGLE3, LLAMA, SHAPES, ShapeHead
from stoop.checkpoint.fetch import resolve_model
from stoop.config.errors import ConfigError
from stoop.config.schema import DeviceConfig
from stoop.config.speculation import MAX_DRAFTS
from stoop.models.head_config import read_head_spec
from stoop.models.head_loader import build_head
from stoop.models.loader import fill_dummy
from stoop.models.registry import read_model_spec

MIN_POSITIONS = 8192
DRAFT_VOCAB = 32000


@contextmanager
def open_shape(
    shape: str, num_drafts: int | str, num_positions: int, head: ShapeHead = EAGLE3
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a model folder and its engine options; the files exist until the block ends.

    A path keeps its own weights and its config's maximum number of positions.
    num_drafts: a text goes to the engine as it is
    """
    if not isinstance(num_drafts, str) and not 0 <= num_drafts <= MAX_DRAFTS:
        raise ConfigError(f"--k {num_drafts}: use 1 to {MAX_DRAFTS} drafts per step, or 0 for none")
    dummy = shape in SHAPES
    if not dummy and not Path(shape).expanduser().exists():
        raise ConfigError(
            f"--shape {shape}: use {', '.join(SHAPES)}, or the path of a model folder or GGUF file"
        )
    options: dict[str, Any] = {"load_format": "dummy" if dummy else "auto"}
    options["skip_tokenizer_init"] = True
    with tempfile.TemporaryDirectory(prefix="stoop-shape-") as root:
        if dummy:
            folder = write_config(Path(root, shape), target_config(shape, num_positions))
        else:
            folder = resolve_model(shape)
        if num_drafts:
            drafter = head.options()
            if head.kind == "eagle3":
                place = _write_head(Path(root, "head"), folder, with_weights=not dummy)
                drafter["model"] = str(place)
            options["speculative_config"] = drafter | never_accepted(num_drafts)
        yield str(folder), options


def target_config(shape: str, num_positions: int) -> dict[str, Any]:
    return SHAPES[shape] | {
        "max_position_embeddings": max(MIN_POSITIONS, num_positions),
        "torch_dtype": SHAPES[shape].get("torch_dtype", "bfloat16"),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def head_config(target: dict[str, Any]) -> dict[str, Any]:
    """Return the config of an EAGLE-3 head with one Llama layer of the target's width."""
    text = target.get("text_config")
    config = target | text if isinstance(text, dict) else target
    heads = config["num_attention_heads"]
    sizes = ("block_ff_dim", "shared_intermediate_size", "intermediate_size")
    return LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": next(config[name] for name in sizes if config.get(name)),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_hidden_layers": 1,
        "rope_theta": config.get("rope_theta") or 10000.0,
        "max_position_embeddings": config["max_position_embeddings"],
        "torch_dtype": config.get("torch_dtype") or config.get("dtype") or "float32",
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
        "draft_vocab_size": min(DRAFT_VOCAB, config["vocab_size"]),
    }


def never_accepted(num_drafts: int | str) -> dict[str, Any]:
    """Keys of speculative_config: so many drafts per step, all rejected."""
    return {
        "num_speculative_tokens": num_drafts,
        "adaptive": isinstance(num_drafts, str),  # a number of drafts is made in every step
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 1,  # tokens per step
    }


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_head(folder: Path, target: Path, with_weights: bool) -> Path:
    """Write a head; if the target has real weights, the head needs a weights file, too."""
    config = json.loads((target / "config.json").read_text())
    write_config(folder, head_config(config))
    if with_weights:
        _write_random_weights(folder, target)
    return folder


def _write_random_weights(folder: Path, target: Path) -> None:
    spec = read_head_spec(folder, read_model_spec(target), "eagle3", dummy=True)
    head = build_head(spec, DeviceConfig.of("cpu", "bfloat16"))
    fill_dummy(head, torch.device("cpu"), seed=0)
    tensors = {view.name: view.data.clone() for view in head.weight_views()}
    save_file(tensors, folder / "model.safetensors")
