"""Draft heads that come with stoop, for models that it fetches by name."""

import json
from pathlib import Path

HEADS = Path(__file__).parent.parent / "heads"
SHIPPED = {"smollm2-135m": HEADS / "smollm2-135m"}  # by the target's name
LENGTHS = "acceptance.json"


def shipped_head(model: str) -> Path | None:
    folder = SHIPPED.get(model)
    names = ("config.json", "model.safetensors", LENGTHS)
    whole = folder is not None and all((folder / name).is_file() for name in names)
    return folder if whole else None


def acceptance_lengths(folder: Path) -> list[float]:
    """Tokens of a step with 1, 2 ... drafts, greedy, as measured when the head was made."""
    found = json.loads((folder / LENGTHS).read_text())
    return [float(length) for length in found["tokens_per_step"]]
