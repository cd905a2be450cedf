"""A training job: its target, its folder, its settings."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from stoop.checkpoint.fetch import resolve_model
from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options, resolve
from stoop.config.schema import Config
from stoop.models.registry import read_model_spec
from stoop.train.progress import Show, Teller, show_nothing
from stoop.train.settings import Say, Settings
from stoop.worker.device import find_device

COMMANDS = "commands.txt"


@dataclass(frozen=True)
class Job:
    """One `train-draft` command: what to train, where, and how to report."""

    target: str
    out: Path
    settings: Settings
    say: Say
    show: Show = show_nothing
    given: frozenset[str] = frozenset()  # names of the settings given on the command line
    fresh: bool = False  # ignore the checkpoint
    fresh_data: bool = False  # discard the data
    command: tuple[str, ...] = ()

    @property
    def teller(self) -> Teller:
        return Teller(self.say, self.show)

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def train(self) -> Path:
        return self.out / "train"

    def again(self, saved: bool = False) -> str:
        """Tell the user how to continue without discarding results. saved: steps were saved"""
        how = "again"
        if self.fresh_data:
            how = "without --fresh-data"
        elif self.fresh and saved:
            how = "without --fresh"
        return f"run the same command {how} to continue"

    def note_command(self) -> None:
        """Record the command for the model card, unless it is already there."""
        line = shlex.join(self.command).replace("\n", " ")
        if line and line not in self.commands():
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / COMMANDS).open("a") as file:
                file.write(line + "\n")

    def forget_commands(self) -> None:
        (self.out / COMMANDS).unlink(missing_ok=True)

    def commands(self) -> list[str]:
        path = self.out / COMMANDS
        return path.read_text().splitlines() if path.exists() else []

    def config(self) -> Config:
        """Resolve the target's config for data and training, without starting an engine."""
        settings = self.settings
        device = find_device(settings.device)
        folder = resolve_model(self.target)
        spec = read_model_spec(folder)
        dtype = settings.dtype
        if dtype == "auto" and device != "cpu":
            dtype = "bfloat16"
        if dtype == "float16" or (dtype == "auto" and spec.dtype == "float16"):
            raise ConfigError("gradients overflow in float16: give --dtype bfloat16 or float32")
        options = make_options(
            self.target,
            {
                "device": device,
                "dtype": dtype,
                "max_model_len": min(settings.data.max_len, spec.max_position),
                "max_num_seqs": settings.data.max_num_seqs or (16 if device == "cpu" else 512),
                "seed": settings.seed,
            },
        )
        return resolve(options, spec, str(folder), device)
