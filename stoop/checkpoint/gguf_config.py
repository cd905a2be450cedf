"""Token ids of GGUF files, which all families share, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def build_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json, in which every id that ends a turn is an end-of-sequence id."""
    ids = token_ids(metadata)
    ends = [ids.get("eos_token_id"), *_turn_ends(metadata)]
    unique_ends = list(dict.fromkeys(end for end in ends if end is not None))
    if unique_ends:
        ids["eos_token_id"] = unique_ends if len(unique_ends) > 1 else unique_ends[0]
    return ids


def token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of bos, eos and padding that the file names."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    named = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in keys.items()}
    return {key: token_id for key, token_id in named.items() if token_id is not None}


def _turn_ends(metadata: Mapping[str, Any]) -> Iterable[int | None]:
    return (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))
