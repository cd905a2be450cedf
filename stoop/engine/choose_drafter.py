"""Chooses an engine's drafter: the one the user asked for, or the head that comes with the model.

A head comes with a model if it ships with stoop, or as an MTP head in the model's own checkpoint.
It exists to make its model faster. On a GPU it does. On a CPU, where verifying more tokens takes
more time, the engine measures while it runs (see `eager_costs`) and keeps the result for the next
start. Nothing is measured before the first answer. How many drafts of an MTP head are usually
accepted is not known, so that on a CPU it drafts only if the user asks for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stoop.checkpoint.fetch import resolve_model
from stoop.checkpoint.shipped import acceptance_lengths, shipped_head
from stoop.config.errors import ConfigError
from stoop.config.resolve import default_graph_mode
from stoop.config.schema import EngineOptions, HeadSpec, ModelSpec, SpecConfig
from stoop.config.speculation import (
    AUTO,
    SpecOptions,
    asks_for_auto,
    needs_head,
    parse_speculation,
    settle_speculation,
)
from stoop.core.report import Report
from stoop.engine.choose_weights import choose_packed
from stoop.engine.draft_costs import CostStore, DraftCosts
from stoop.models.draft_vocab import cut_vocabulary
from stoop.models.head_config import read_head_spec
from stoop.models.head_source import proposed_drafts
from stoop.models.mtp_config import has_mtp_head, read_mtp_spec
from stoop.models.registry import read_model_spec
from stoop.ops.packed import TILE

CPU_DRAFTS = 3  # at most
GPU_DRAFTS = 3  # at most: as fast as 4 for one request on an H200, and faster for several
MTP_DRAFTS = 3  # later drafts of a head that was trained to make one are seldom right
MIN_GAIN = 1.05  # a head with less gain is not worth its memory
AS_GOOD = 0.95  # share of the best gain that counts as equally good


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter, or none, and why."""

    spec: SpecConfig | None
    note: str = ""  # the reason, if the user did not choose
    store: CostStore | None = None  # where to keep what its drafts cost
    usual_tokens: Sequence[float] = ()  # tokens per step with 1, 2 ... drafts


def expand_auto(options: EngineOptions, device: str, report: Report | None) -> Any:
    """The options' speculative_config, "auto" replaced by the model's head, whether it pays or not;
    None if there is no head."""
    if not asks_for_auto(options.speculative_config):
        return options.speculative_config
    packed = choose_packed(options, device, report)
    target = resolve_model(options.model, revision=options.revision, report=report, packed=packed)
    folder = shipped_head(target)
    if folder is not None:
        return {"model": str(folder), "num_speculative_tokens": _usual_drafts(device)}
    if has_mtp_head(target, read_model_spec(target)):
        return {"method": "mtp", "num_speculative_tokens": MTP_DRAFTS}
    return None


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
        usual: Sequence[float] = ()
        if asked is not None and asked.model is None and needs_head(asked):
            asked = _with_own_head(asked, model, target, device, options.load_format == "dummy")
            usual = acceptance_lengths(Path(asked.model)) if asked.model else ()
        if asked is None:
            return DrafterChoice(None)
        spec = _settle(asked, options, model, target, report, device, packed)
        store = None
        if spec.adaptive and _measures_steps(_mode(options, device), device, options.run_ahead):
            store = _store_of(spec, options, model, packed)
        return DrafterChoice(spec, store=store, usual_tokens=usual)
    if options.load_format == "dummy":
        return DrafterChoice(None)
    folder = shipped_head(target)
    if folder is None:
        return _choose_mtp(options, model, target, device, report)
    num_drafts, note, store = GPU_DRAFTS, "the head that ships with stoop", None
    lengths, adaptive = acceptance_lengths(folder), None
    if device == "cpu":
        store = CostStore(options, model, folder, _num_threads(options), packed)
        costs = store.load()
        known = costs is not None and not costs.busy  # other programs distort what steps cost
        num_drafts, why = _cpu_drafts(costs if known else None, lengths)
        if num_drafts == 0:
            return DrafterChoice(None, why)
        note += why
        if _measures_steps(_mode(options, device), device, options.run_ahead):
            num_drafts, adaptive = CPU_DRAFTS, True
    wanted = SpecOptions(
        "eagle3", str(folder), num_speculative_tokens=num_drafts, adaptive=adaptive
    )
    spec = _settle(wanted, options, model, target, report, device, packed)
    return DrafterChoice(spec, note, store, lengths)


def _choose_mtp(
    options: EngineOptions, model: ModelSpec, target: Path, device: str, report: Report | None
) -> DrafterChoice:
    if model.num_mtp_layers > 1:
        layers = f"the model's MTP head has {model.num_mtp_layers} layers"
        return DrafterChoice(None, f"{layers}, and stoop drafts with heads of one layer only")
    if not has_mtp_head(target, model):
        return DrafterChoice(None)
    if device == "cpu":
        note = 'on a CPU the model\'s MTP head drafts if asked to (-sc \'{"method": "mtp"}\')'
        return DrafterChoice(None, note)
    # Weights are packed on CPUs only.
    spec = _settle(SpecOptions("mtp"), options, model, target, report, device, packed=False)
    return DrafterChoice(spec, "the model's own head")


def _usual_drafts(device: str) -> int:
    """Of a head that ships with stoop."""
    return CPU_DRAFTS if device == "cpu" else GPU_DRAFTS


def _with_own_head(
    asked: SpecOptions, model: ModelSpec, target: Path, device: str, dummy: bool
) -> SpecOptions:
    """The options with the head that comes with the model."""
    if asked.method == "mtp":
        return asked
    folder = shipped_head(target)
    if folder is not None:
        number = asked.num_speculative_tokens
        if number is None:
            number = _usual_drafts(device)
        return replace(asked, model=str(folder), num_speculative_tokens=number)
    if asked.method is None and has_mtp_head(target, model, dummy):
        return replace(asked, method="mtp")
    raise ConfigError(
        "speculative_config lacks model, and no head ships with this model: name the draft head, "
        'or use {"method": "ngram"}'
    )


def _cpu_drafts(costs: DraftCosts | None, lengths: Sequence[float]) -> tuple[int, str]:
    """How many drafts per step are fastest, and why, from what earlier runs measured."""
    times = costs.times(CPU_DRAFTS) if costs is not None else None
    if costs is None or times is None:
        return CPU_DRAFTS, ""
    num_drafts, gain = choose_drafts(times, lengths)
    if num_drafts == 0:
        if not costs.sure:
            return CPU_DRAFTS, ""
        return 0, f"the model's head does not make it faster here ({gain:.2f}x at best)"
    return (
        num_drafts,
        f": about {gain:.1f}x as fast here at usual acceptance, by what earlier runs measured",
    )


def _store_of(
    spec: SpecConfig, options: EngineOptions, model: ModelSpec, packed: bool
) -> CostStore | None:
    """For heads in a folder of their own."""
    if spec.head is None or spec.folder is None or spec.method == "mtp":
        return None
    if not CostStore.can_name(Path(spec.folder)):
        return None
    cut = spec.head.vocab_size if spec.head.draft_tokens is not None else None
    return CostStore(options, model, Path(spec.folder), _num_threads(options), packed, cut)


def _num_threads(options: EngineOptions) -> int:
    return options.num_threads or torch.get_num_threads()


def _settle(
    wanted: SpecOptions,
    options: EngineOptions,
    model: ModelSpec,
    target: Path,
    report: Report | None,
    device: str,
    packed: bool,
) -> SpecConfig:
    """Settle all options; a head is read and checked against the target."""
    dummy, multiple = options.load_format == "dummy", TILE if packed else 1
    adaptive = _captures_decodes(_mode(options, device)) and device != "cpu"
    if wanted.method == "mtp":
        own = read_mtp_spec(target, model, dummy=dummy)
        cut = cut_vocabulary(own, model, wanted, target, multiple)
        spec = settle_speculation(wanted, cut, str(target), MTP_DRAFTS, adaptive)
        return _check_adaptive(spec, wanted, options, device)
    if wanted.model is None:
        return _check_adaptive(settle_speculation(wanted, None, None), wanted, options, device)
    folder = resolve_model(wanted.model, revision=wanted.revision, report=report)
    head: HeadSpec = read_head_spec(folder, model, wanted.method, dummy=dummy)
    head = cut_vocabulary(head, model, wanted, folder, multiple)
    proposed = proposed_drafts(folder)
    spec = settle_speculation(wanted, head, str(folder), proposed, adaptive)
    return _check_adaptive(spec, wanted, options, device)


def _mode(options: EngineOptions, device: str) -> str:
    return default_graph_mode(device) if options.graph_mode == "auto" else options.graph_mode


def _measures_steps(mode: str, device: str, run_ahead: int | None) -> bool:
    """Whether steps can be timed while requests are served: each runs alone, on the host."""
    return device == "cpu" and mode == "none" and not run_ahead


def may_vary(mode: str, device: str, run_ahead: int | None) -> bool:
    """Whether the number of drafts can vary in this graph mode."""
    return _captures_decodes(mode) or _measures_steps(mode, device, run_ahead)


def _captures_decodes(mode: str) -> bool:
    return mode not in ("none", "piecewise")


def _check_adaptive(
    spec: SpecConfig, wanted: SpecOptions, options: EngineOptions, device: str
) -> SpecConfig:
    if spec.adaptive and not may_vary(_mode(options, device), device, options.run_ahead):
        asked = "adaptive=true"
        if wanted.num_speculative_tokens == AUTO:
            asked = "num_speculative_tokens=auto"
        other = ", or to none with run_ahead=0" if device == "cpu" else ""
        raise ConfigError(
            f"speculative_config has {asked}, which needs graphs of decode batches: give a fixed "
            f"number of drafts, or set graph_mode to step or full{other}"
        )
    return spec


def gains(costs: DraftCosts, most: int, lengths: Sequence[float]) -> bool:
    """Whether drafts that are accepted as usual pay. lengths: as below; empty if unknown"""
    times = costs.times(most)
    return times is not None and (not lengths or choose_drafts(times, lengths)[0] > 0)


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
