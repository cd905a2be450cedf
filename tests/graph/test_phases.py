"""A step as data: how modes cut it, what phases say they touch, and a cut for the host."""

import collections
import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoop import SamplingParams
from stoop.graph.buffers import Buffer, Extent, Lifetime
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.phases import Phase, check_order, cut, undeclared
from stoop.graph.sanitizer import UndeclaredRead
from stoop.worker import phases as order
from stoop.worker import runner as runner_module
from stoop.worker.target import Target
from support.checkpoints import CheckpointStore
from support.drafters import DrafterStore, make_spec_llm
from support.engines import generate_ids
from support.graph_workload import make_graph_llm, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)


class Lane:
    """Draft decodes that can or cannot follow lengths on the device."""

    name = "draft decode"

    def __init__(self, advances: bool, captured: bool = True) -> None:
        self.advances = advances
        self.descriptors = [BatchExecutionDescriptor(RunMode.FULL, 1, 1, 1)] if captured else []


def phase(name: str, **options: Any) -> Phase:
    return Phase(name, lambda run: None, reads=set(), writes=set(), **options)


def step(lane: Any = None, times: int = 3, host: bool = False) -> list[Phase]:
    """I C V U P D, or I C V U N without a lane."""
    found = [phase("I"), phase("C", forward=True), phase("V"), phase("U")]
    if host:
        found[2] = replace(found[2], host_call=lambda batch: None)
    if lane is None:
        return [*found, phase("N", drafts=1)]
    decode = phase("D", forward=True, lane=lane, times=times, drafts=2)
    return [*found, phase("P", forward=True, drafts=1), decode]


def shown(mode: RunMode, phases: list[Phase]) -> str:
    """Segments in order; captured ones in brackets."""
    found = cut(mode, phases)
    return " ".join(f"[{s.name}]" if s.captured else s.name for s in found)


FOLLOWS, PLANNED = Lane(True), Lane(False)
CUTS = [
    (RunMode.NONE, step(), "I C V U N"),
    (RunMode.PIECEWISE, step(), "I [C] V U N"),
    (RunMode.FULL, step(), "I [C] V U N"),
    (RunMode.STEP, step(), "[ICVUN]"),
    (RunMode.NONE, step(Lane(True, captured=False)), "I C V U P D"),
    (RunMode.NONE, step(FOLLOWS), "I C V U P [D]"),
    (RunMode.PIECEWISE, step(Lane(True, captured=False)), "I [C] V U [P] D"),
    (RunMode.FULL, step(FOLLOWS), "I [C] V U [P] [D]"),
    (RunMode.STEP, step(FOLLOWS), "[ICVUPD]"),
    (RunMode.STEP, step(PLANNED), "[ICVUP] [D]"),
    (RunMode.STEP, step(PLANNED, times=1), "[ICVUPD]"),
    (RunMode.STEP, step(FOLLOWS, host=True), "[IC] [VUPD]"),
    (RunMode.STEP, step(host=True), "[IC] [VUN]"),
    (RunMode.STEP, step(PLANNED, host=True), "[IC] [VUP] [D]"),
    (RunMode.FULL, step(FOLLOWS, host=True), "I [C] V U [P] [D]"),
]


@pytest.mark.parametrize(("mode", "phases", "wanted"), CUTS)
def test_a_mode_is_a_way_of_cutting(mode: RunMode, phases: list[Phase], wanted: str) -> None:
    assert shown(mode, phases) == wanted
    assert [p for segment in cut(mode, phases) for p in segment.phases] == phases


def test_nothing_joins_a_graph_of_another_lane() -> None:
    phases = [*step(PLANNED), phase("X", drafts=1)]
    assert shown(RunMode.STEP, phases) == "[ICVUP] [D] [X]"


@pytest.mark.parametrize("mode", ["none", "piecewise", "full", "full_decode_only", "step"])
@pytest.mark.parametrize(
    ("name", "backend", "num_drafts"),
    [("eagle3-right", "reference", 3), ("eagle3-right", "hostplan", 3), ("ngram", "reference", 2)],
)
def test_steps_may_go_without_drafting(
    drafters: DrafterStore, mode: str, name: str, backend: str, num_drafts: int
) -> None:
    """A graph of the whole step drafts in any case; answers are the same."""
    llm = make_spec_llm(drafters.get(name), num_drafts, graph_mode=mode, attention_backend=backend)
    batch = [[5], [6, 7], [8] * 9]
    wanted = generate_ids(llm, batch, GREEDY)
    llm.engine.scheduler.num_drafts = 0
    assert generate_ids(llm, batch, GREEDY) == wanted


# ---- what phases say ----


def buffer(name: str) -> Buffer:
    return Buffer(name, torch.zeros(1), Lifetime.STEP)


KV = Buffer("kv 0", torch.zeros(2, 1), Lifetime.SLOT, Extent.BLOCKS)
BUFFERS = [buffer("rows"), buffer("ids"), buffer("hidden"), KV]


def test_what_outlives_a_step_says_by_what_it_is_kept() -> None:
    """Else the sanitizer would not compare it."""
    with pytest.raises(AssertionError, match="`history` outlives its step"):
        Buffer("history", torch.zeros(1), Lifetime.SLOT)


def test_a_phase_that_reads_before_anything_writes_is_refused() -> None:
    inputs = Phase("I", print, reads={"rows"}, writes={"ids"})
    forward = Phase("C", print, reads={"ids", "kv *"}, writes={"hidden", "kv *"})
    check_order([inputs, forward], BUFFERS, by_host=("rows",))
    with pytest.raises(ValueError, match="phase C reads `ids`, which no earlier phase writes"):
        check_order([forward, inputs], BUFFERS, by_host=("rows",))
    with pytest.raises(ValueError, match="phase I reads `rows`, which no earlier phase writes"):
        check_order([inputs, forward], BUFFERS, by_host=())


def test_a_phase_that_names_no_buffer_is_refused() -> None:
    wrong = Phase("C", print, reads=set(), writes={"hiden"})
    with pytest.raises(ValueError, match="phase C names `hiden`, which is not a buffer"):
        check_order([wrong], BUFFERS, by_host=())


def test_patterns_cover_numbered_buffers() -> None:
    assert undeclared(["kv 0", "kv 11", "ids"], ["kv *"]) == ["ids"]


def test_every_phase_of_an_engine_says_what_it_reads(
    drafters: DrafterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that is not declared is caught under the sanitizer, which names it."""
    drafter = drafters.get("eagle3-noisy")
    make_spec_llm(drafter, 3, graph_mode="step", sanitize=True)  # all is declared
    phases = Target.phases

    def forgetful(self: Target) -> list[Phase]:
        found = phases(self)
        found[2] = replace(found[2], reads=found[2].reads - {"hidden"})
        return found

    monkeypatch.setattr(Target, "phases", forgetful)
    # In a graph of the whole step `hidden` is written before it is read.
    make_spec_llm(drafter, 3, graph_mode="step", sanitize=True)
    monkeypatch.setattr(
        runner_module,
        "step_phases",
        lambda *args: order.step_phases(*args[:2], {"V": lambda batch: None}),
    )
    with pytest.raises(UndeclaredRead, match=r"VUPD, STEP .* relies on `hidden`"):
        make_spec_llm(drafter, 3, graph_mode="step", sanitize=True)


def test_two_phases_of_one_name_are_refused() -> None:
    class Twice:
        def phases(self) -> list[Phase]:
            return [phase("N"), phase("N")]

        def buffers(self) -> list[Buffer]:
            return []

    class Nothing:
        def phases(self) -> list[Phase]:
            return []

    with pytest.raises(AssertionError, match="two phases of one name"):
        order.step_phases(Nothing(), Twice(), {})  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"host calls before \['Q'\]"):
        order.step_phases(Nothing(), None, {"Q": print})  # type: ignore[arg-type]


def test_live_entries_follow_the_extent() -> None:
    tensor = torch.zeros(9, 3)
    made = {extent: Buffer("b", tensor, Lifetime.STEP, extent) for extent in Extent}
    live = {extent: b.live(num_reqs=2, num_tokens=5) for extent, b in made.items()}
    assert live == {
        Extent.TOKENS: slice(5),
        Extent.REQS: slice(2),
        Extent.SLOTS: slice(8),  # all but the sink
        Extent.BLOCKS: slice(None),
        Extent.SCRATCH: None,
    }


# ---- the host before verification ----


class HostMask:
    """A mask over the vocabulary that the host writes between C and V of every step."""

    def __init__(self) -> None:
        self.token: int | None = None  # that the mask makes less likely
        self.num_calls = 0

    def write(self, target: Target, batch: Any) -> None:
        self.num_calls += 1
        mask: torch.Tensor = target.mask  # type: ignore[attr-defined]
        mask.zero_()
        if self.token is not None and batch.num_reqs:
            mask[self.token] = -100.0


@pytest.fixture
def host_mask(monkeypatch: pytest.MonkeyPatch) -> HostMask:
    """Engines that are made from here on verify under it."""
    made, init, verify = HostMask(), Target.__init__, Target.verify

    def with_mask(self: Target, *args: Any) -> None:
        init(self, *args)
        size = self.model.spec.vocab_size
        self.mask = torch.zeros(size, dtype=torch.float64)  # type: ignore[attr-defined]

    def masked(self: Target, run: Any) -> None:
        logits = self.model.logits
        with pytest.MonkeyPatch.context() as inner:
            mask = self.mask  # type: ignore[attr-defined]
            inner.setattr(self.model, "logits", lambda hidden: logits(hidden) + mask)
            verify(self, run)

    def with_call(target: Target, speculator: Any, host_calls: Any) -> list[Phase]:
        calls = {"V": functools.partial(made.write, target)}
        return order.step_phases(target, speculator, calls)

    monkeypatch.setattr(Target, "__init__", with_mask)
    monkeypatch.setattr(Target, "verify", masked)
    monkeypatch.setattr(runner_module, "step_phases", with_call)
    return made


@pytest.mark.parametrize("mode", ["none", "piecewise", "full", "step"])
def test_the_host_may_act_before_verification(
    checkpoints: CheckpointStore, host_mask: HostMask, mode: str
) -> None:
    """As grammar masks will: the step is cut there, and replays read what the host wrote."""
    folder: Path = checkpoints.get("llama3", dtype="float64")
    llm = make_graph_llm(folder, graph_mode=mode, sanitize=mode != "none")
    every = prompts()[:6]
    for params in (GREEDY.replace(max_tokens=12), SEEDED.replace(max_tokens=12)):
        host_mask.token = None
        unmasked = generate_ids(llm, every, params)
        token = collections.Counter(itertools.chain(*unmasked)).most_common(1)[0][0]
        biased = generate_ids(llm, every, params.replace(logit_bias={token: -100.0}))
        host_mask.token = token
        before = host_mask.num_calls
        assert generate_ids(llm, every, params) == biased != unmasked
        assert host_mask.num_calls > before
    names = set(llm.engine.runner.executor.managers)
    assert names == {"none": set(), "step": {"C", "IC", "VU"}}.get(mode, {"C"})


def test_drafts_follow_a_host_call(drafters: DrafterStore, host_mask: HostMask) -> None:
    llm = make_spec_llm(drafters.get("eagle3-right"), 3, graph_mode="step", sanitize=True)
    (output,) = llm.generate([[5]], GREEDY)
    assert sorted(llm.engine.runner.executor.managers) == ["C", "D", "IC", "P", "VUPD"]
    assert output.outputs[0].spec is not None
    assert output.outputs[0].spec.num_accepted_tokens > 3
    assert host_mask.num_calls > 0
