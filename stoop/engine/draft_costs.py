"""What drafts cost on this machine, kept between runs."""

import dataclasses
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stoop.config.environ import cache_dir
from stoop.config.schema import EngineOptions, ModelSpec
from stoop.config.speculation import MAX_DRAFTS
from stoop.version import __version__

log = logging.getLogger(__name__)

STORE = "draft-costs.json"
WEIGHTS = "model.safetensors"
OLD = 7 * 24 * 3600  # seconds
SURE = 5  # tries
MAX_LOAD = 1024  # requests at once whose costs are kept
SHORTEST, LONGEST = 1e-3, 1e7  # milliseconds: a record that says anything else is broken
PATIENCE = 0.5  # seconds to wait while another process writes; a step waits, too


def load_of(num_reqs: int) -> int:
    """Requests are counted in powers of two, rounded up."""
    return 1 << max(num_reqs - 1, 0).bit_length()


def between(known: Mapping[int, float], count: int) -> float:
    """The time with so many drafts, from those with other numbers: it lies on lines between them,
    or on the line through the nearest two. known: at least two"""
    if count in known:
        return known[count]
    nearest = sorted(sorted(known), key=lambda each: abs(each - count))[:2]
    below = [each for each in known if each < count]
    above = [each for each in known if each > count]
    low, high = (max(below), min(above)) if below and above else sorted(nearest)
    found = known[low] + (count - low) * (known[high] - known[low]) / (high - low)
    return max(found, min(known.values()) / 2)  # times fall no further


@dataclass(frozen=True)
class DraftCosts:
    """How long a step takes that serves one request, or several."""

    ms: Mapping[int, float]  # by number of drafts that it verifies and makes
    busy: bool = False  # whether other programs slowed it down
    load: int = 1  # requests, a power of two that is not below their number
    tries: int = SURE  # steps at least, by number of drafts, that were compared with steps around
    at: float = field(default_factory=time.time, compare=False)  # seconds since the epoch
    num_threads: int = field(default=0, compare=False)  # that steps ran on; the store knows it

    @property
    def sure(self) -> bool:
        return self.tries >= SURE

    def times(self, max_drafts: int) -> list[float] | None:
        """Milliseconds with 0, 1 ... `max_drafts` drafts; None if too little is known."""
        if len(self.ms) < 2:
            return None
        return [between(self.ms, count) for count in range(max_drafts + 1)]

    def refined_by(self, newer: "DraftCosts") -> "DraftCosts":
        """The mean of both, unless one alone was disturbed or they had other numbers of threads."""
        both = self.ms.keys() & newer.ms.keys()
        if not both or (self.busy and not newer.busy):
            return newer
        if newer.busy and not self.busy:
            return self
        if newer.num_threads != self.num_threads:
            return newer
        tries = min(self.tries + newer.tries, SURE)
        mean = {count: (self.ms[count] + newer.ms[count]) / 2 for count in both}
        for ms in (self.ms, newer.ms):  # what one has alone, relative to what both have
            scale = sum(mean[count] for count in both) / sum(ms[count] for count in both)
            mean |= {count: ms[count] * scale for count in ms.keys() - both}
        return dataclasses.replace(newer, ms=dict(sorted(mean.items())), tries=tries)


class CostStore:
    """A small JSON file in the cache folder. If it cannot be read or written, nothing is kept."""

    def __init__(
        self,
        options: EngineOptions,
        model: ModelSpec,
        head: Path,
        num_threads: int,
        packed: bool = False,
        num_draft_tokens: int | None = None,
    ) -> None:
        """num_threads: that steps run on; packed: weights stay quantised, which makes plain steps
        much faster; num_draft_tokens: that the head may draft, if not all that it could"""
        self.path = cache_dir() / STORE
        self.key = _key(options, model, head) + ("|packed" if packed else "")
        if num_draft_tokens is not None:
            self.key += f"|{num_draft_tokens} draft tokens"
        self._num_threads = num_threads
        self._warned = False
        self._before: dict[int, DraftCosts | None] = {}  # by load: what earlier runs found

    @staticmethod
    def can_name(head: Path) -> bool:
        """Whether the head is a single file, by which its costs are kept."""
        return (head / WEIGHTS).is_file()

    def load(self, load: int = 1) -> DraftCosts | None:
        """What was found with so many requests; None if that is long ago: machines
        change, and costs that keep drafts away are not measured any more. What another number of
        threads took is a guess."""
        try:
            found = _parse(self._read()[self._key_of(load)], load)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            return None
        if found.num_threads != self._num_threads:
            found = dataclasses.replace(found, tries=0)
        return found if abs(time.time() - found.at) <= OLD else None

    def undisturbed(self) -> list[DraftCosts]:
        """Of every load, from runs that no other program disturbed."""
        found = (self.load(1 << place) for place in range(MAX_LOAD.bit_length()))
        return [each for each in found if each is not None and not each.busy]

    def _key_of(self, load: int) -> str:
        return self.key if load == 1 else f"{self.key}|{load} at once"

    def add(self, costs: DraftCosts) -> None:
        """Once or several times in a run: what it adds last counts."""
        from filelock import FileLock, Timeout

        costs = dataclasses.replace(costs, num_threads=self._num_threads)
        before = self._before.setdefault(costs.load, self.load(costs.load))
        merged = before.refined_by(costs) if before else costs
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Another process may add its own at the same time.
            with FileLock(self.path.with_name(f".{STORE}.lock"), timeout=PATIENCE):
                self._write({self._key_of(costs.load): dataclasses.asdict(merged)})
        except Timeout:
            log.info("%s is locked: what drafts cost is not kept this time", self.path)
        except (OSError, NotImplementedError) as error:  # the latter without locks for files
            if not self._warned:
                say = "%s cannot be written (%s): what drafts cost is not kept"
                log.warning(say, self.path, error)
            self._warned = True

    def _write(self, records: Mapping[str, object]) -> None:
        """Beside the others in the file. Only the holder of the lock writes."""
        try:
            text = json.dumps({**self._read(), **records}, indent=1)
        except RecursionError:  # a file that stoop did not write
            text = json.dumps(records, indent=1)
        fresh = self.path.with_name(f".{STORE}.new")  # what a full disk left of it is overwritten
        fresh.write_text(text + "\n")
        fresh.replace(self.path)

    def _read(self) -> dict[str, object]:
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def _parse(record: Any, load: int) -> DraftCosts:
    ms = {int(count): float(taken) for count, taken in record["ms"].items()}
    if any(
        not 0 <= count <= MAX_DRAFTS or not SHORTEST <= taken <= LONGEST
        for count, taken in ms.items()
    ):
        raise ValueError("not measured by stoop")
    tries, num_threads = int(record.get("tries", 0)), int(record.get("num_threads", 0))
    return DraftCosts(ms, bool(record["busy"]), load, tries, float(record["at"]), num_threads)


def _key(options: EngineOptions, model: ModelSpec, head: Path) -> str:
    """What costs depend on. The number of threads is left out: costs measured with another number
    are a better guess than none, until the engine has measured its own."""
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    others = {"weights": options.weight_dtype, "KV": options.kv_cache_dtype}
    dtype += "".join(f" {name} {asked}" for name, asked in others.items() if asked != "auto")
    if options.activation_bits != 16:
        dtype += f" {options.activation_bits}-bit activations"
    with (head / WEIGHTS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    backend = options.attention_backend
    target = f"{model.architecture} {model.num_layers} x {model.hidden_size}"
    return "|".join((digest, target, dtype, backend, _processor(), version("torch"), __version__))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"
