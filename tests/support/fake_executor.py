"""An executor without a model, for tests of the engine core and its loop."""

from collections.abc import Callable
from typing import Any

from stoop.core.step import RowResult, StepPlan, StepResult, TokenScores


class FakeExecutor:
    """Token i of each answer is `token_at(i)`. Steps fail for the plans that `fails` chooses."""

    block_bytes = 1
    caches_prefixes = True
    num_snapshots = 0
    draft_seconds = waited = 0.0
    busy = False
    wants_scores = False

    def __init__(self, num_blocks: int, token_at: Callable[[int], int] = lambda i: i) -> None:
        self.num_blocks = num_blocks
        self.token_at = token_at
        self.fails: Callable[[StepPlan], bool] = lambda plan: False
        self.num_tokens: dict[int, int] = {}  # of the answer so far, by slot
        self.steps: list[StepResult] = []

    def launch(self, plan: StepPlan) -> "FakeExecutor":
        for admission in plan.admissions:
            num_output = len(admission.token_ids) - admission.num_prompt_tokens
            self.num_tokens[admission.slot] = num_output
        if self.fails(plan):
            raise RuntimeError("the device\nsays no")
        rows = []
        for row in plan.rows:
            token_ids = []
            if row.samples:
                token_ids = [self.token_at(self.num_tokens[row.slot])]
                self.num_tokens[row.slot] += 1
            found = RowResult(row.request_id, row.epoch, token_ids)
            if row.rules.params.logprobs is not None:
                found.scores = [TokenScores([token], [-0.5], 1) for token in token_ids]
            rows.append(found)
        self.steps.append(StepResult(plan.index, rows))
        return self

    def result(self) -> StepResult:
        return self.steps.pop(0)

    def end_step(self) -> None:
        pass

    def note_idle(self) -> None:
        pass

    def metrics(self) -> dict[str, Any]:
        return {}

    def forget_rows(self) -> None:
        self.steps.clear()
