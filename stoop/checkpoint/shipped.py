"""Draft heads that come with stoop, for models that it fetches by name."""

import json
from pathlib import Path

HEADS = Path(__file__).parent.parent / "heads"
SHIPPED = {"smollm2-135m": HEADS / "smollm2-135m"}  # by the target's name
LENGTHS = "acceptance.json"


def shipped_head(model: str) -> Path | None:
    folder = SHIPPED.get(model)
    return folder if folder is not None and (folder / "config.json").is_file() else None


def acceptance_lengths(folder: Path) -> list[float]:
    """Tokens of a step with 1, 2 ... drafts, greedy, as measured when the head was made."""
    found = json.loads((folder / LENGTHS).read_text())
    return [float(length) for length in found["tokens_per_step"]]
