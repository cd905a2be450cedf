"""What drafts cost on this machine, kept between runs."""

import dataclasses
import hashlib
import json
import logging
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from stoop.config.environ import cache_dir
from stoop.config.schema import EngineOptions, ModelSpec
from stoop.version import __version__

log = logging.getLogger(__name__)

STORE = "draft-costs.json"
MAX_LOAD = 1024  # requests at once whose costs are kept


@dataclass(frozen=True)
class DraftCosts:
    """How long a step takes that serves one request, or several."""

    num_drafts: int
    plain_ms: float  # without drafts
    drafted_ms: float  # verifying `num_drafts` and making as many
    busy: bool = False  # whether other programs slowed it down
    load: int = 1  # requests, a power of two that is not below their number

    def times(self, max_drafts: int) -> list[float]:
        """Milliseconds with 0, 1 ... `max_drafts` drafts, which cost about the same each."""
        each = max(self.drafted_ms - self.plain_ms, 0.0) / self.num_drafts
        return [self.plain_ms + count * each for count in range(max_drafts + 1)]

    def refined_by(self, newer: "DraftCosts") -> "DraftCosts":
        """The mean of both, unless one was disturbed and the other was not."""
        if self.num_drafts != newer.num_drafts or (self.busy and not newer.busy):
            return newer
        if newer.busy and not self.busy:
            return self
        plain, drafted = self.plain_ms + newer.plain_ms, self.drafted_ms + newer.drafted_ms
        return dataclasses.replace(newer, plain_ms=plain / 2, drafted_ms=drafted / 2)


class CostStore:
    """A small JSON file in the cache folder. If it cannot be read or written, nothing is kept."""

    def __init__(
        self, options: EngineOptions, model: ModelSpec, head: Path, packed: bool = False
    ) -> None:
        """packed: weights stay quantised, which makes plain steps much faster"""
        self.path = cache_dir() / STORE
        self.key = _key(options, model, head) + ("|packed" if packed else "")

    def load(self, load: int = 1) -> DraftCosts | None:
        """load: of the requests"""
        try:
            return _parse(self._read()[self._key_of(load)])
        except (KeyError, TypeError, ValueError):
            return None

    def undisturbed(self) -> list[DraftCosts]:
        """Of every load, from runs that no other program disturbed."""
        found = (self.load(1 << place) for place in range(MAX_LOAD.bit_length()))
        return [each for each in found if each is not None and not each.busy]

    def _key_of(self, load: int) -> str:
        return self.key if load == 1 else f"{self.key}|{load} at once"

    def add(self, costs: DraftCosts) -> None:
        known = self.load(costs.load)
        merged = known.refined_by(costs) if known else costs
        content = {**self._read(), self._key_of(costs.load): dataclasses.asdict(merged)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(content, indent=1) + "\n")
            fresh.replace(self.path)
        except OSError as error:
            log.warning("%s cannot be written (%s): what drafts cost is not kept", self.path, error)

    def _read(self) -> dict[str, object]:
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def _parse(record: object) -> DraftCosts:
    costs = DraftCosts(**record)  # type: ignore[arg-type]
    numbers = (costs.num_drafts, costs.plain_ms, costs.drafted_ms)
    if not all(isinstance(n, int | float) and n > 0 for n in numbers):
        raise ValueError(record)
    return costs


def _key(options: EngineOptions, model: ModelSpec, head: Path) -> str:
    """What costs depend on. The number of threads is left out: costs measured with another number
    are a better guess than none, and are refined while the engine runs."""
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    others = {"weights": options.weight_dtype, "KV": options.kv_cache_dtype}
    dtype += "".join(f" {name} {asked}" for name, asked in others.items() if asked != "auto")
    if options.activation_bits != 16:
        dtype += f" {options.activation_bits}-bit activations"
    digest = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()[:16]
    backend = options.attention_backend
    return "|".join((digest, dtype, backend, _processor(), version("torch"), __version__))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"
