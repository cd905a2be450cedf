"""Draft heads that ship with stoop, each for the weights that it was trained on."""

import json
import logging
from pathlib import Path

from stoop.checkpoint.fingerprint import matches, take_fingerprint

logger = logging.getLogger(__name__)

HEADS = Path(__file__).parent.parent / "heads"
SHIPPED = {"smollm2-135m": HEADS / "smollm2-135m"}  # by the model that the head was trained for
LENGTHS = "acceptance.json"
FINGERPRINT = "target.json"


def shipped_head(model: Path) -> Path | None:
    """The head that ships with stoop for the weights in the folder `model`, or None.

    The folder may be a converted GGUF file, a snapshot from the hub or any other copy. Takes
    milliseconds, and less than one for models without a head.
    """
    for head in SHIPPED.values():
        if _is_whole(head) and matches(_read_fingerprint(head), model):
            logger.info("the weights in %s are those that the head in %s is for", model, head)
            return head
    return None


def write_fingerprint(model: Path, head: Path) -> None:
    """Write the fingerprint of the weights in the folder `model` into the head's folder."""
    text = json.dumps(take_fingerprint(model))
    (head / FINGERPRINT).write_text(text + "\n", encoding="utf-8")


def acceptance_lengths(folder: Path) -> list[float]:
    """Tokens per step with 1, 2 ... drafts, greedy, as measured when the head was trained."""
    found = json.loads((folder / LENGTHS).read_text())
    return [float(length) for length in found["tokens_per_step"]]


def _is_whole(head: Path) -> bool:
    names = ("config.json", "model.safetensors", LENGTHS, FINGERPRINT)
    return all((head / name).is_file() for name in names)


def _read_fingerprint(head: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((head / FINGERPRINT).read_text(encoding="utf-8"))
    return content
