"""An executor with one model runner, in the process of the engine core."""

from typing import Any

from stoop.config.schema import Config
from stoop.core.report import Report
from stoop.core.step import StepPlan
from stoop.core.structured import StructuredOutputs
from stoop.grammar.compiler import PendingGrammar
from stoop.worker.output import LaunchedStep
from stoop.worker.runner import ModelRunner
from stoop.worker.spinning import share_cores


class UniprocExecutor:
    """The `Executor` of one process and one device."""

    def __init__(self, config: Config, report: Report | None = None) -> None:
        # Before the runner: loading uses all cores too.
        on_cpu, threads = config.device.device == "cpu", config.device.num_threads
        self._spin_control = share_cores(threads is not None) if on_cpu else None
        self.runner = ModelRunner(config, report)
        if self._spin_control is not None:
            self._spin_control.note_loaded()

    @property
    def num_blocks(self) -> int:
        return self.runner.num_blocks

    @property
    def block_bytes(self) -> int:
        return self.runner.state_layout.block_bytes

    @property
    def caches_prefixes(self) -> bool:
        return not self.runner.state_layout.recurrent

    @property
    def num_snapshots(self) -> int:
        return self.runner.num_snapshots

    @property
    def waited(self) -> float:
        return self.runner.outputs.waited

    @property
    def draft_seconds(self) -> float:
        return self.runner.draft_seconds

    @property
    def busy(self) -> bool:
        return self._spin_control is not None and self._spin_control.busy

    def metrics(self) -> dict[str, Any]:
        return self.runner.counts.as_metrics()

    def compile_grammar(self, asked: StructuredOutputs) -> PendingGrammar:
        return self.runner.grammars.store.request(asked)

    def warm_up_grammars(self) -> None:
        """Load what the first grammar would wait for."""
        self.runner.grammars.store.warm_up()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if self._spin_control is not None:
            self._spin_control.note_start()
        return self.runner.launch(plan)

    def end_step(self) -> None:
        if self._spin_control is not None:
            self._spin_control.note_step()

    def note_idle(self) -> None:
        if self._spin_control is not None:
            self._spin_control.note_idle()

    def forget_rows(self) -> None:
        self.runner.forget_rows()
