"""The log of a training run: a JSON lines file, lines on the terminal, and a plot."""

import json
from pathlib import Path
from typing import Any

from stoop.plotting import find_pyplot
from stoop.train.files import read_records, write_records
from stoop.train.progress import Teller, duration
from stoop.train.settings import Say


class Record:
    """The log of a folder; until `begin`, the file still is the previous run's."""

    def __init__(self, folder: Path, teller: Teller) -> None:
        self.folder, self.path = folder, folder / "log.jsonl"
        self.say, self.show = teller.say, teller.show
        self.first_step = -1  # entries after it are dropped; -1 drops all
        self._begun = False

    def begin(self) -> None:
        """Drop, once, the entries of steps that this run repeats."""
        if not self._begun:
            self._begun = True
            kept = [entry for entry in read_log(self.path) if entry["step"] <= self.first_step]
            write_records(self.path, kept)

    def lacks_evaluation(self, step: int) -> bool:
        return not any(e["step"] == step and e["split"] == "val" for e in read_log(self.path))

    def add(self, entry: dict[str, Any], num_steps: int) -> None:
        self.begin()
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        rates = " ".join(f"{rate:.0%}" for rate in entry["acceptance"])
        losses = " ".join(f"{loss:.2f}" for loss in entry["losses"])
        line = (
            f"step {entry['step']}/{num_steps}: loss {entry['loss']:.3f} ({losses}), right {rates}"
        )
        if entry["split"] == "val":
            self.say(f"held out, {line}, {entry['length']:.2f} tokens per step at K = {entry['k']}")
            return
        left = (num_steps - entry["step"]) * entry["tokens"] / max(entry["tokens_per_s"], 1e-9)
        self.say(
            f"{line}, lr {entry['lr']:.1e}, {entry['tokens_per_s']:,.0f} tokens/s, "
            f"{entry['memory_gib']:.1f} GiB, {duration(left)} left"
        )


def read_log(path: Path) -> list[dict[str, Any]]:
    return read_records(path)


def draw_curve(log: Path, image: Path, say: Say) -> None:
    """Plot loss and acceptance by step, if matplotlib is installed."""
    pyplot = find_pyplot("curve", say)
    if pyplot is None:
        return
    figure, (losses, rates) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    entries = read_log(log)
    for split, style in (("train", "-"), ("val", "o--")):
        chosen = [entry for entry in entries if entry["split"] == split]
        steps = [entry["step"] for entry in chosen]
        losses.plot(steps, [entry["loss"] for entry in chosen], style, label=split)
        for number in range(len(chosen[0]["acceptance"]) if chosen else 0):
            values = [entry["acceptance"][number] for entry in chosen]
            label = f"draft {number + 1}" if split == "train" else None
            rates.plot(steps, values, style, color=f"C{number}", markersize=3, label=label)
    losses.set(xlabel="step", ylabel="loss, all passes")
    rates.set(xlabel="step", ylabel="drafts 1 to j all right", ylim=(0, 1))
    losses.legend()
    rates.legend()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)
