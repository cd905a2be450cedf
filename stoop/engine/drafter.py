"""Which drafter an engine gets: the one that was asked for, or the head that comes with the model.

A head that comes with the model is there to make it faster. On a GPU it does; on a CPU, where
verifying more tokens costs more time, engines that differ in nothing else show whether it does,
and with how many drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoop.checkpoint.fetch import resolve_model
from stoop.checkpoint.report import Report
from stoop.checkpoint.shipped import acceptance_lengths, shipped_head
from stoop.config.schema import EngineOptions, ModelSpec, SpecConfig
from stoop.config.speculation import (
    SpecOptions,
    asks_for_auto,
    parse_speculation,
    settle_speculation,
)
from stoop.engine.probe import MAX_DRAFTS, Build, step_times
from stoop.models.head_config import proposed_drafts, read_head_spec

GPU_DRAFTS = 4  # of 2 to 6 the fastest, or within 3 % of it, for one request on an H200
MIN_GAIN = 1.05  # below it a head is not worth its memory
AS_GOOD = 0.95  # of the best gain


@dataclass(frozen=True)
class Drafter:
    spec: SpecConfig | None
    note: str = ""  # of a choice that nobody spelled out: why


def spelled_out(given: Any, model: str, device: str) -> Any:
    """What "auto" stands for, for whoever wants the head that comes with a model even if it does
    not pay; None if there is no such head."""
    if not asks_for_auto(given):
        return given
    folder = shipped_head(resolve_model(model))
    most = MAX_DRAFTS if device == "cpu" else GPU_DRAFTS
    return folder and {"model": str(folder), "num_speculative_tokens": most}


def find_drafter(
    options: EngineOptions, model: ModelSpec, device: str, build: Build, report: Report | None
) -> Drafter:
    if not asks_for_auto(options.speculative_config):
        asked = parse_speculation(options.speculative_config)
        return Drafter(_settle(asked, options, model, report) if asked else None)
    target = resolve_model(options.model, revision=options.revision, local_only=True)
    folder = shipped_head(target)
    if folder is None or options.load_format == "dummy":
        return Drafter(None)
    num_drafts, note = GPU_DRAFTS, "the head that comes with the model"
    if device == "cpu":
        times = step_times(options, model, folder, build, report)
        lengths = acceptance_lengths(folder)
        num_drafts, gain = choose_drafts(times, lengths)
        if num_drafts == 0:
            return Drafter(None, f"its head makes it no faster here ({gain:.2f}x at best)")
        note += (
            f": a step takes {times[num_drafts]:.0f} ms here instead of {times[0]:.0f} and yields "
        )
        note += f"{lengths[num_drafts - 1]:.1f} tokens, greedy, on benchmarks; it pays from "
        note += f"{times[num_drafts] / times[0]:.1f} on"
    wanted = SpecOptions("eagle3", str(folder), num_speculative_tokens=num_drafts)
    return Drafter(_settle(wanted, options, model, report), note)


def _settle(
    wanted: SpecOptions, options: EngineOptions, model: ModelSpec, report: Report | None
) -> SpecConfig:
    """A head is read and held against the target."""
    if wanted.model is None:
        return settle_speculation(wanted, None, None)
    folder = resolve_model(wanted.model, revision=wanted.revision, report=report)
    dummy = options.load_format == "dummy"
    head = read_head_spec(folder, model, wanted.method, dummy=dummy)
    return settle_speculation(wanted, head, str(folder), proposed_drafts(folder))


def choose_drafts(times: Sequence[float], lengths: Sequence[float]) -> tuple[int, float]:
    """How many a step, 0 for none, and how many times as fast as none that is.

    Of numbers that are about as good the least: it loses less where drafts are worse than usual.
    times: milliseconds of a step with 0, 1 ... drafts; lengths: tokens of a step with 1, 2 ...
    """
    gains = [length * times[0] / ms for ms, length in zip(times[1:], lengths, strict=False)]
    best = max(gains)
    if best < MIN_GAIN:
        return 0, best
    chosen = next(gain for gain in gains if gain >= AS_GOOD * best)
    return gains.index(chosen) + 1, chosen
