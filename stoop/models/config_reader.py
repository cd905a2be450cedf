"""Reads and checks the values of a checkpoint's `config.json`; nothing is guessed.

Reads the layout of transformers 4 (`torch_dtype`) and of 5 (`dtype`).
"""

import json
import math
from pathlib import Path
from typing import Any

from stoop.config.errors import CheckpointError
from stoop.config.schema import DTYPES
from stoop.config.values import is_number, is_whole, shown

# Far above what any model has, so that a damaged config cannot make us allocate absurd sizes.
MAX_SIZE = 1 << 24
MAX_LAYERS = 1024


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: is it a model folder?") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check the file") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: fetch it again")
    return content


class Reader:
    """Reads and checks values of a config; null counts as missing."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def whole(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not is_whole(value) or not 1 <= value <= most:
            raise CheckpointError(
                f"config.json has {key}={shown(value)} where a whole number from 1 to {most} is "
                "needed: fix the config or fetch it again"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.config.get(key)
        return as_number(key, default if value is None else value, positive=False)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(
                f"config.json has {key}={shown(value)} where true or false is needed: fix the "
                "config or fetch it again"
            )
        return bool(value)


def with_defaults(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A config with these values where it has none; null counts as missing."""
    missing = {key: value for key, value in defaults.items() if config.get(key) is None}
    return config | missing


def as_number(name: str, value: Any, positive: bool = True) -> float:
    if is_number(value):
        try:
            number = float(value)
        except OverflowError:  # an integer with hundreds of digits
            number = math.inf
        if math.isfinite(number) and (number > 0 or (number == 0 and not positive)):
            return number
    kind = "a positive number" if positive else "a number of at least 0"
    raise CheckpointError(
        f"config.json has {name}={shown(value)} where {kind} is needed: fix the config or fetch it "
        "again"
    )


def checkpoint_dtype(config: dict[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(
            f"config.json has dtype {shown(dtype)}: stoop loads {', '.join(DTYPES)}"
        )
    return dtype


def eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-text tokens of the generation config if it has them, else of the model's."""
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.exists() else None
    text = config.get("text_config")  # of multimodal models
    for place in (config, text if isinstance(text, dict) else {}):
        value = place.get("eos_token_id") if value is None else value
    return token_ids("eos_token_id", value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_whole(token) for token in ids):
        raise CheckpointError(
            f"{name} is {shown(value)} where token ids are needed: fix the config"
        )
    return tuple(ids)
