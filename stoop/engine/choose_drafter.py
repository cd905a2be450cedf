"""Chooses an engine's drafter: the one the user asked for, or the head that ships with the model.

A shipped head exists to make its model faster. On a GPU it does. On a CPU, where verifying more
tokens takes more time, the engine measures while it runs (see `draft_trial`) and keeps the result
for the next start. Nothing is measured before the first answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoop.checkpoint.fetch import resolve_model
from stoop.checkpoint.shipped import acceptance_lengths, shipped_head
from stoop.config.errors import ConfigError
from stoop.config.schema import EngineOptions, ModelSpec, SpecConfig
from stoop.config.speculation import (
    SpecOptions,
    asks_for_auto,
    needs_head,
    parse_speculation,
    settle_speculation,
)
from stoop.core.report import Report
from stoop.engine.draft_costs import CostStore, DraftCosts
from stoop.models.head_config import read_head_spec
from stoop.models.head_source import proposed_drafts

CPU_DRAFTS = 3  # where nothing has been measured yet, and the maximum
GPU_DRAFTS = 4  # the fastest of 2 to 6, or within 3 % of it, for one request on an H200
MIN_GAIN = 1.05  # a head with less gain is not worth its memory
AS_GOOD = 0.95  # share of the best gain that counts as equally good


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter, or none, and why."""

    spec: SpecConfig | None
    note: str = ""  # the reason, if the user did not choose
    store: CostStore | None = None  # where to keep what its drafts cost
    usual_tokens: Sequence[float] = ()  # tokens per step with 1, 2 ... drafts
    costs_known: bool = False  # from earlier runs


def expand_auto(given: Any, model: str, device: str) -> Any:
    """Replace "auto" by the model's head, whether it pays or not; None if there is no head."""
    if not asks_for_auto(given):
        return given
    folder = shipped_head(resolve_model(model))
    num_drafts = CPU_DRAFTS if device == "cpu" else GPU_DRAFTS
    return folder and {"model": str(folder), "num_speculative_tokens": num_drafts}


def choose_drafter(
    options: EngineOptions,
    model: ModelSpec,
    target: Path,
    device: str,
    report: Report | None,
    packed: bool = False,
) -> DrafterChoice:
    """target: the model's folder; packed: its weights stay quantised"""
    if not asks_for_auto(options.speculative_config):
        asked = parse_speculation(options.speculative_config)
        if asked is not None and asked.model is None and needs_head(asked):
            asked = replace(asked, model=str(_own_head(target)))
        return DrafterChoice(_settle(asked, options, model, report) if asked else None)
    folder = shipped_head(target)
    if folder is None or options.load_format == "dummy":
        return DrafterChoice(None)
    num_drafts, note, store, known = GPU_DRAFTS, "the head that ships with stoop", None, False
    lengths = acceptance_lengths(folder)
    if device == "cpu":
        store = CostStore(options, model, folder, packed)
        costs = store.load()
        known = costs is not None and not costs.busy  # other programs distort what steps cost
        num_drafts, why = _cpu_drafts(costs if known else None, lengths)
        if num_drafts == 0:
            return DrafterChoice(None, why)
        note += why
    wanted = SpecOptions("eagle3", str(folder), num_speculative_tokens=num_drafts)
    return DrafterChoice(_settle(wanted, options, model, report), note, store, lengths, known)


def _own_head(target: Path) -> Path:
    folder = shipped_head(target)
    if folder is None:
        raise ConfigError(
            "speculative_config lacks model, and no head ships with this model: name the draft "
            'head, or use {"method": "ngram"}'
        )
    return folder


def _cpu_drafts(costs: DraftCosts | None, lengths: Sequence[float]) -> tuple[int, str]:
    """How many drafts per step, and why, from what earlier runs measured."""
    if costs is None:
        return CPU_DRAFTS, "; stoop measures while it runs whether this helps here"
    times = costs.times(CPU_DRAFTS)
    num_drafts, gain = choose_drafts(times, lengths)
    if num_drafts == 0:
        return 0, f"the model's head does not make it faster here ({gain:.2f}x at best)"
    return num_drafts, (
        f": a step took {times[num_drafts]:.0f} ms here instead of {times[0]:.0f}, and yields "
        f"{lengths[num_drafts - 1]:.1f} tokens on benchmarks"
    )


def _settle(
    wanted: SpecOptions, options: EngineOptions, model: ModelSpec, report: Report | None
) -> SpecConfig:
    """Settle all options; a head is read and checked against the target."""
    if wanted.model is None:
        return settle_speculation(wanted, None, None)
    folder = resolve_model(wanted.model, revision=wanted.revision, report=report)
    dummy = options.load_format == "dummy"
    head = read_head_spec(folder, model, wanted.method, dummy=dummy)
    return settle_speculation(wanted, head, str(folder), proposed_drafts(folder))


def choose_drafts(times: Sequence[float], lengths: Sequence[float]) -> tuple[int, float]:
    """The number of drafts per step, 0 for none, and the speedup over plain decoding.

    Of numbers that are about equally good it takes the smallest, which loses less where drafts
    are worse than usual. times: milliseconds of a step with 0, 1 ... drafts; lengths: tokens of a
    step with 1, 2 ... drafts
    """
    gains = [length * times[0] / ms for ms, length in zip(times[1:], lengths, strict=False)]
    best = max(gains)
    if best < MIN_GAIN:
        return 0, best
    chosen = next(gain for gain in gains if gain >= AS_GOOD * best)
    return gains.index(chosen) + 1, chosen
