"""Installs a trained head into stoop/heads, with its model card, measured acceptance, and the
fingerprint of the target's weights.

    python tools/ship_head.py draft/head smollm2-135m acceptance.json [more.json ...]

The JSON files come from `stoop bench acceptance --out`; the first must have K = 1, 2, 3 at
temperature 0. To update only the fingerprint of an installed head:

    python tools/ship_head.py --fingerprint smollm2-135m
"""

import json
import shutil
import sys
from pathlib import Path
from statistics import mean
from typing import Any

# Converting a GGUF file needs the registered model families.
import stoop.models.registry  # noqa: F401
from stoop.checkpoint.fetch import resolve_model
from stoop.checkpoint.shipped import write_fingerprint

HEADS = Path(__file__).resolve().parent.parent / "stoop" / "heads"
MAX_BYTES = 25_000_000
CHOSEN_FROM = (1, 2, 3)  # values of K that -sc auto chooses from on a CPU


def tokens_per_step(rows: list[dict[str, Any]]) -> list[float]:
    """Return greedy tokens per step for K = 1, 2, 3, averaged over the question files."""
    lengths: dict[int, list[float]] = {k: [] for k in CHOSEN_FROM}
    for row in rows:
        if row["temperature"] == 0 and row["k"] in lengths:
            lengths[row["k"]].append(row["mean_acceptance_length"])
    missing = [str(k) for k, found in lengths.items() if not found]
    if missing:
        raise SystemExit(f"greedy rows of K = {', '.join(missing)} are missing: measure them too")
    return [round(mean(lengths[k]), 3) for k in CHOSEN_FROM]


def table(record: dict[str, Any]) -> str:
    """Format the acceptance of every file, temperature and K for the model card."""
    lines = [
        f"## Acceptance: {record['dtype']} on {record['device']}, {record['max_tokens']} tokens, "
        f"draft_sample_method {record['speculative_config']['draft_sample_method']}",
        "",
        "| questions | temperature | K | tokens per step | share of drafts accepted, by position |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in record["rows"]:
        rates = " ".join(f"{rate:.2f}" for rate in row["acceptance_rates"])
        name, length = Path(row["questions"]).stem, row["mean_acceptance_length"]
        lines.append(f"| {name} | {row['temperature']:g} | {row['k']} | {length:.2f} | {rates} |")
    return "\n".join(lines) + "\n"


def ship(head: Path, heads: Path, name: str, acceptance: list[Path], target: Path) -> Path:
    """Copy a head into `heads`. target: the folder of the weights it was trained on"""
    records = [json.loads(path.read_text()) for path in acceptance]
    lengths = tokens_per_step(records[0]["rows"])
    weights = head / "model.safetensors"
    if weights.stat().st_size > MAX_BYTES:
        raise SystemExit(
            f"{weights} is larger than {MAX_BYTES / 1e6:g} MB: use a smaller vocabulary"
        )
    folder = heads / name
    folder.mkdir(parents=True, exist_ok=True)
    for each in (weights, head / "config.json"):
        shutil.copy(each, folder)
    card = (head / "README.md").read_text()
    (folder / "README.md").write_text("\n".join((card, *map(table, records))))
    (folder / "acceptance.json").write_text(json.dumps({"tokens_per_step": lengths}) + "\n")
    write_fingerprint(target, folder)
    return folder


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fingerprint"] and len(sys.argv) == 3:
        write_fingerprint(resolve_model(sys.argv[2]), HEADS / sys.argv[2])
        raise SystemExit
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    made, target, *measured = sys.argv[1:]
    print(ship(Path(made), HEADS, target, [Path(each) for each in measured], resolve_model(target)))
