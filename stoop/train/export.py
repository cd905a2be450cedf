"""Exports a trained head in the EAGLE authors' layout or in that of speculators."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stoop.config.errors import ConfigError
from stoop.config.schema import DeviceConfig
from stoop.models.config_reader import read_json
from stoop.models.eagle import EagleSpec, default_taps
from stoop.models.head_loader import build_head
from stoop.models.head_source import TAPS
from stoop.train.head import trained
from stoop.train.vocabulary import Vocabulary
from stoop.version import __version__

LAYOUTS = ("eagle", "speculators")
# Settings that a head copies from its target's config.
_ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")


@dataclass(frozen=True)
class Trained:
    """A trained head and what its export needs."""

    spec: EagleSpec
    vocabulary: Vocabulary
    masters: dict[str, Tensor]
    target: str  # as the user named it
    target_config: dict[str, Any]  # its config.json
    num_layers: int  # of the target
    num_drafts: int  # K that the exported config proposes


def export(found: Trained, folder: Path, layout: str, dtype: str, card: str) -> None:
    """Write the head's weights, config and model card to a folder."""
    if layout not in LAYOUTS:
        raise ConfigError(f"--layout {layout}: use {', '.join(LAYOUTS)} or both")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(found, dtype)
    config = _speculators_config(found, dtype)
    if layout == "eagle":
        tensors = {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()}
        config = _eagle_config(found, dtype)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it readable by its owner only
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(card)


def _tensors(found: Trained, dtype: str) -> dict[str, Tensor]:
    """Return the head's tensors by canonical name, with fused weights split."""
    head = build_head(found.spec, DeviceConfig.of("cpu", dtype))
    for name, parameter in trained(head).items():
        parameter.data.copy_(found.masters[name])
    tensors = {view.name: view.data.contiguous() for view in head.weight_views()}
    if found.spec.maps_vocabulary:
        tensors["d2t"] = torch.from_numpy(found.vocabulary.d2t)
        tensors["t2d"] = torch.from_numpy(found.vocabulary.t2d)
    return tensors


def _layer_config(found: Trained) -> dict[str, Any]:
    decoder, source = found.spec.decoder, found.target_config
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "rms_norm_eps": decoder.rms_norm_eps,
        "max_position_embeddings": source["max_position_embeddings"],
        "vocab_size": found.spec.target_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if decoder.rope.kind != "default":
        config |= {name: source[name] for name in _ROTARY if source.get(name) is not None}
    return config | {"rope_theta": decoder.rope.theta}


def _flags(spec: EagleSpec) -> dict[str, bool]:
    return {
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norms,
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
    }


def _eagle_config(found: Trained, dtype: str) -> dict[str, Any]:
    """Write a config without default taps, since engines count listed taps differently."""
    spec = found.spec
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if spec.taps != default_taps(found.num_layers):
        eagle[TAPS] = list(spec.taps)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(found),
        "torch_dtype": dtype,
        "draft_vocab_size": spec.decoder.vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        **_flags(spec),
        "eagle_config": eagle,
    }


def _speculators_config(found: Trained, dtype: str) -> dict[str, Any]:
    spec = found.spec
    proposal = {"proposal_type": "greedy", "speculative_tokens": found.num_drafts}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": _layer_config(found),
        "dtype": dtype,
        "draft_vocab_size": spec.decoder.vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        **_flags(spec),
        TAPS: list(spec.taps),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": found.target,
                "architectures": found.target_config.get("architectures"),
            },
        },
    }


def model_card(
    found: Trained,
    commands: Sequence[str],
    counts: dict[str, Any],
    steps: int,
    val: dict[str, Any] | None,
) -> str:
    """Describe the head: what it is, how it was trained, and how well it drafts."""
    spec, vocabulary = found.spec, found.vocabulary
    lines = [
        f"# EAGLE-3 draft head for {found.target}",
        "",
        "Made by `stoop train-draft`:",
        "",
        "```",
        *commands,
        "```",
        "",
        f"- stoop {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"- data: {counts['answers']:,} answers of the target ({counts['greedy']:,} greedy), "
        f"{counts['answer_tokens']:,} answer tokens, {counts['prompt_tokens']:,} prompt tokens; "
        f"{counts['loops_dropped']:,} answers dropped as loops",
        f"- draft vocabulary: {len(vocabulary):,} of {vocabulary.target_size:,} tokens, which "
        f"cover {vocabulary.coverage:.2%} of the answers",
        f"- taps {', '.join(map(str, spec.taps))}; {steps:,} steps",
    ]
    if val is not None:
        rates = ", ".join(f"{rate:.1%}" for rate in val["acceptance"])
        lines += [
            f"- held-out text: drafts 1 to j are all right at {rates} of the positions "
            f"(j = 1 to {len(val['acceptance'])})",
            f"- held-out text, simulating the engine's steps: {val['length']:.2f} tokens per step "
            f"at K = {val['k']}",
        ]
    usage = {
        "method": "eagle3",
        "model": "path/to/this",
        "num_speculative_tokens": found.num_drafts,
    }
    lines += ["", "```", f"stoop generate {found.target} -p '...' -sc '{json.dumps(usage)}'", "```"]
    return "\n".join(lines) + "\n"


def read_target_config(folder: Path) -> dict[str, Any]:
    """A config.json; of a multimodal model, with the settings of its text part."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config
