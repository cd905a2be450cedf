"""Lifetimes: what counts as fresh for a graph that is about to read it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stoop.graph.buffers import Buffer, Extent, Lifetime
from stoop.graph.sanitizer import Sanitizer, StaleRead


class Rig:
    """One buffer of each lifetime, and graphs that read them."""

    def __init__(self) -> None:
        self.step, self.draft = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
        self.slot, self.out = torch.zeros(4), torch.zeros(4)
        lifetimes = {
            "inputs": (self.step, Lifetime.STEP),
            "draft inputs": (self.draft, Lifetime.DRAFT),
            "history": (self.slot, Lifetime.SLOT),
        }
        extents = {Lifetime.SLOT: Extent.SLOTS}
        self.sanitizer = Sanitizer(
            Buffer(name, t, life, extents.get(life, Extent.SCRATCH))
            for name, (t, life) in lifetimes.items()
        )

    def learn(self, key: str, function: Callable[[], object]) -> None:
        self.sanitizer.learn(key, function)

    def read(self, tensor: Tensor) -> Callable[[], object]:
        return lambda: self.out[: tensor.shape[0]].copy_(tensor)


def stale(rig: Rig, key: str) -> str:
    with pytest.raises(StaleRead) as refusal:
        rig.sanitizer.check_reads(key, "a graph")
    return str(refusal.value)


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.learn("step", rig.read(rig.step))
    rig.learn("draft", rig.read(rig.draft))
    rig.learn("slot", rig.read(rig.slot))
    rig.sanitizer.begin_step()
    return rig


def test_a_step_makes_inputs_of_steps_and_drafts_stale(rig: Rig) -> None:
    assert "`inputs` never written, read in step 1" in stale(rig, "step")
    assert "`draft inputs` never written, read in step 1" in stale(rig, "draft")
    rig.sanitizer.check_reads("slot", "a graph")  # slot state outlives steps
    rig.step.fill_(1)
    rig.draft.fill_(1)
    rig.sanitizer.check_reads("step", "a graph")
    rig.sanitizer.check_reads("draft", "a graph")
    rig.sanitizer.begin_step()
    assert "`inputs` last written in step 1, read in step 2" in stale(rig, "step")
    assert "`draft inputs` last written in step 1, read in step 2" in stale(rig, "draft")


def test_a_draft_decode_makes_the_last_ones_inputs_stale_and_no_others(rig: Rig) -> None:
    rig.step.fill_(1)
    for _ in range(3):
        rig.sanitizer.begin_draft_decode()
        stale(rig, "draft")
        rig.draft.fill_(1)
        rig.sanitizer.check_reads("draft", "a graph")
        rig.sanitizer.check_reads("step", "a graph")
    rig.sanitizer.begin_draft_decode()
    assert "`draft inputs` last written in step 1, read in step 1" in stale(rig, "draft")
    assert rig.step.tolist() == [1] * 4 and rig.slot.tolist() == [0.0] * 4


def test_what_a_graph_writes_before_it_reads_may_be_stale(rig: Rig) -> None:
    def derive() -> None:
        rig.draft.copy_(rig.slot)
        rig.out.copy_(rig.draft)

    rig.learn("derives", derive)
    rig.sanitizer.begin_step()
    rig.sanitizer.check_reads("derives", "a graph")
    stale(rig, "draft")


def test_only_the_elements_that_a_graph_reads_count(rig: Rig) -> None:
    rig.learn("half", rig.read(rig.draft[:2]))
    rig.sanitizer.begin_step()
    rig.draft[:2] = 3.0
    rig.sanitizer.check_reads("half", "a graph")
    stale(rig, "draft")
    rig.sanitizer.begin_draft_decode()
    stale(rig, "half")
