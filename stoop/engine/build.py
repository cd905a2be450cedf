"""From options to an engine core: find the model, settle the configuration, load."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from stoop.checkpoint.fetch import resolve_model
from stoop.config.check import check_options
from stoop.config.errors import ConfigError
from stoop.config.resolve import log_ignored, resolve
from stoop.config.schema import Config, EngineOptions, ModelSpec
from stoop.config.speculation import asks_for_auto
from stoop.core.report import Report
from stoop.engine.choose_drafter import DrafterChoice, choose_drafter, gains
from stoop.engine.choose_weights import choose_packed
from stoop.engine.core import EngineCore
from stoop.engine.draft_estimates import usual_rates
from stoop.engine.draft_policy import AdaptiveDrafts
from stoop.engine.eager_costs import EagerCosts
from stoop.engine.step_costs import GraphCosts, StepTimes
from stoop.engine.uniproc import UniprocExecutor
from stoop.models.registry import read_model_spec
from stoop.worker.device import find_device

log = logging.getLogger(__name__)

FEW_DRAFTS = 3


@dataclass(frozen=True)
class BuiltCore:
    """A core that is ready to step, and what it was made of."""

    config: Config
    executor: UniprocExecutor
    core: EngineCore


class CoreBuilder:
    """Settles options against a model at once; `build` then does the slow part.

    In between, the caller may load what can still refuse them, such as a tokenizer.
    """

    def __init__(self, options: EngineOptions, report: Report | None = None) -> None:
        check_options(options)  # before anything is fetched
        self.options = options
        self._report = report
        self._device = find_device(options.device)
        self._packed = choose_packed(options, self._device, report)
        self.folder: Path = resolve_model(
            options.model, revision=options.revision, report=report, packed=self._packed
        )
        self._model: ModelSpec = read_model_spec(self.folder)
        # Refuse before a drafter is read.
        settled = resolve(options, self._model, str(self.folder), self._device, packed=self._packed)
        log_ignored(options, settled)
        self._choice = choose_drafter(
            options, self._model, self.folder, self._device, report, self._packed
        )

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where the tokenizer is; None if the user wants none."""
        if self.options.skip_tokenizer_init:
            return None
        return Path(self.options.tokenizer) if self.options.tokenizer else self.folder

    def settle(self) -> Config:
        """The configuration with the chosen drafter; nothing is loaded."""
        return self._settle(self._choice)

    def build(self) -> BuiltCore:
        """Load the model and its drafter."""
        choice = self._choice
        if choice.spec is None or not asks_for_auto(self.options.speculative_config):
            return self._build(choice)
        try:
            return self._build(choice)
        except ConfigError as error:
            # A drafter that the user did not ask for gives way to options that it does not fit.
            note = f"the model's head does not fit the other options ({error})"
        return self._build(DrafterChoice(None, note))

    def _settle(self, choice: DrafterChoice) -> Config:
        folder = str(self.folder)
        config = resolve(self.options, self._model, folder, self._device, choice.spec, self._packed)
        return replace(config, draft_note=choice.note)

    def _build(self, choice: DrafterChoice) -> BuiltCore:
        config = self._settle(choice)
        executor = UniprocExecutor(config, self._report)
        core = EngineCore(config.schedule, config.cache, executor)
        if config.schedule.adaptive:
            core.drafts = _make_policy(config, choice, executor)
        return BuiltCore(config, executor, core)


def _make_policy(
    config: Config, choice: DrafterChoice, executor: UniprocExecutor
) -> AdaptiveDrafts | None:
    schedule, eager = config.schedule, config.graph.mode == "none"
    costs = _eager_costs(config, choice) if eager else _graph_costs(config, executor)
    if costs is None:
        return None
    made = AdaptiveDrafts(
        costs,
        costs.counts,
        usual_rates(choice.usual_tokens, schedule.num_drafts),
        has_kv=schedule.drafter_has_kv,
        keeps_prefixes=config.cache.enable_prefix_caching and executor.caches_prefixes,
        starts_over=eager,
    )
    log.info("drafts per step: %s", made.describe())
    return made


def _eager_costs(config: Config, choice: DrafterChoice) -> EagerCosts:
    """Without graphs, each number of drafts can be made. Few are measured sooner."""
    schedule, store = config.schedule, choice.store
    most = schedule.num_drafts
    counts = range(most + 1) if most <= FEW_DRAFTS else schedule.draft_counts
    if store is None:
        return EagerCosts(counts)
    # What keeps drafts away would not be measured again, so that takes more than a few tries.
    known = [
        costs
        for costs in store.undisturbed()
        if costs.sure or gains(costs, most, choice.usual_tokens)
    ]
    return EagerCosts(counts, known, store.add)


def _graph_costs(config: Config, executor: UniprocExecutor) -> GraphCosts | None:
    """Times every decode graph."""
    schedule, graph = config.schedule, config.graph
    times = executor.runner.time_decodes()
    if {num_drafts for _, num_drafts in times} != set(schedule.draft_counts):
        log.warning(
            "every step makes %d drafts: their number varies only where decode batches of all "
            "sizes are captured (graph_mode=full or step, and a backend that allows it)",
            schedule.num_drafts,
        )
        return None
    made = StepTimes(times)
    largest = made.sizes[-1]
    if largest < schedule.max_num_seqs:
        limited = graph.capture_sizes is None
        log.warning(
            "steps of more than %d requests make no drafts, since no larger decode batch is "
            "captured: %s, up to max_num_seqs=%d, or lower that",
            largest,
            "raise max_capture_size" if limited else "give larger capture_sizes",
            schedule.max_num_seqs,
        )
    return GraphCosts(made, schedule.draft_counts, config.device.device == "cpu")
