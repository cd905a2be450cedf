"""Two bugs to put back into engines, for tests of what must notice them; more in tests/graph/."""

from typing import Any

import pytest

from stoop.attention.hostplan import HostPlanBackend
from stoop.batch.input_batch import InputBatch
from stoop.graph.manager import CudaGraphManager

Patch = pytest.MonkeyPatch


def share_warm_up_state(patch: Patch) -> None:
    """What warm-up planned is not planned again inside the graph."""
    capture = CudaGraphManager.capture

    def shared(self: CudaGraphManager, descriptor: Any, prepare: Any, run: Any) -> Any:
        state = prepare()
        return capture(self, descriptor, lambda: state, run)

    patch.setattr(CudaGraphManager, "capture", shared)


def skip_the_rebuild(patch: Patch) -> None:
    """The plan of the capture serves every replay."""
    plan = HostPlanBackend._plan
    seen: set[int] = set()

    def stale(self: HostPlanBackend, batch: InputBatch, max_seq_len: int) -> None:
        if not batch.num_reqs or id(self) not in seen:
            seen.add(id(self))
            plan(self, batch, max_seq_len)

    patch.setattr(HostPlanBackend, "_plan", stale)
