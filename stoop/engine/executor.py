"""What an engine core asks of whatever runs its steps.

Today one model runner in the same process does (`stoop.engine.uniproc`). One runner per rank fits
the same protocol: every rank is given the same plans in the same order, and one of them answers.
"""

from typing import Any, Protocol

from stoop.core.step import StepPlan, StepResult
from stoop.core.structured import StructuredOutputs


class StepHandle(Protocol):
    """A launched step. Results are read once, in the order of the launches."""

    @property
    def wants_scores(self) -> bool:
        """Whether the next step must wait until this result has been read."""
        ...

    def result(self) -> StepResult:
        """Wait for the step and read what it found."""
        ...


class PendingGrammar(Protocol):
    """A grammar that is being compiled. It is kept as long as a request refers to it."""

    @property
    def done(self) -> bool: ...

    @property
    def error(self) -> str | None:
        """Why it cannot be compiled, in one sentence; None if it can, or is not done."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, this long at most."""
        ...


class Executor(Protocol):
    """Runs the steps of one model."""

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        ...

    @property
    def caches_prefixes(self) -> bool:
        """Whether KV blocks alone bring a prefix back: not if layers have recurrent state."""
        ...

    @property
    def num_snapshots(self) -> int:
        """Snapshots of recurrent state that plans may copy to and from."""
        ...

    @property
    def waited(self) -> float:
        """Seconds that the host has waited for results so far; 0 where it computes them itself."""
        ...

    @property
    def draft_seconds(self) -> float:
        """Host time that the last step spent on making drafts."""
        ...

    @property
    def busy(self) -> bool:
        """Whether other programs use the processor, which distorts timings."""
        ...

    def metrics(self) -> dict[str, Any]:
        """How batches ran: steps by run mode, tokens computed, and tokens of padding."""
        ...

    def compile_grammar(self, asked: StructuredOutputs) -> PendingGrammar:
        """Start to compile a grammar, without waiting. Its requests are planned when it is done."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step without waiting for it."""
        ...

    def end_step(self) -> None:
        """A step's result has been taken in."""
        ...

    def note_idle(self) -> None:
        """No request can be computed for now."""
        ...

    def forget_rows(self) -> None:
        """Drop what an interrupted launch left behind. Plans start again from admissions."""
        ...
