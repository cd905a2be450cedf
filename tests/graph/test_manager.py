"""The manager of captured graphs: the order of captures, replays, and what is watched."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from stoop.core.sampling_kind import SamplingKind
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.dispatch import BatchShape, Dispatcher
from stoop.graph.manager import CudaGraphManager
from stoop.graph.phases import AttentionState, Phase
from stoop.graph.refusals import MissingGraph
from stoop.graph.tape import TapeBackend
from stoop.spec.base import Pass
from stoop.worker.executor import PhaseExecutor

N, P, F, S = RunMode.NONE, RunMode.PIECEWISE, RunMode.FULL, RunMode.STEP
GREEDY, NOISE, SAMPLING = SamplingKind.GREEDY, SamplingKind.NOISE, SamplingKind.FULL


def step_graph(reqs: int, kind: SamplingKind, query_len: int = 1) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(S, reqs * query_len, reqs, query_len, kind)


class FakeBackend:
    """Runs the function in place of a capture, and remembers what was replayed."""

    name = "fake"
    num_bytes = 0

    def __init__(self) -> None:
        self.events: list[Any] = []

    def capture(self, function: Callable[[], object]) -> Any:
        self.events.append("capture")
        function()
        number = sum(event == "capture" for event in self.events)
        return SimpleNamespace(
            replay=lambda context=None: self.events.append(("replay", number, context))
        )

    def host_call(self, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        raise NotImplementedError


class FakeWatch:
    """Notes what the manager tells the sanitizer, among the backend's events."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def learn(self, key: Any, function: Callable[[], object]) -> None:
        self.events.append(("learn", key))
        function()

    def check_reads(self, key: Any, reader: str) -> None:
        self.events.append(("check", key, reader))

    def begin_draft_decode(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class FakeBatch:
    num_reqs_padded: int = 1


class FakeLane:
    """The target's lane, with sizes but no model."""

    max_reqs = 8

    def __init__(self, descriptors: list[BatchExecutionDescriptor], events: list[Any]) -> None:
        self.descriptors = descriptors
        self.events = events

    def capture_state(self, descriptor: BatchExecutionDescriptor) -> AttentionState:
        state = AttentionState(FakeBatch(), SimpleNamespace())
        self.events.append(("prepare", descriptor, state))
        return state

    def context(self, metadata: Any) -> Any:
        return metadata

    def dispatch(self, shape: BatchShape) -> BatchExecutionDescriptor:
        raise NotImplementedError


class Captured(NamedTuple):
    manager: CudaGraphManager
    backend: "FakeBackend"
    states: dict[BatchExecutionDescriptor, AttentionState]


def capture_all(
    descriptors: list[BatchExecutionDescriptor],
    watched: bool = False,
    title: str = "",
    report: Any = None,
) -> Captured:
    """Every descriptor, by an executor with a single phase, which is a whole step too."""
    backend = FakeBackend()
    lane = FakeLane(descriptors, backend.events)
    watch = FakeWatch(backend.events) if watched else None

    def run(made: Pass) -> None:
        manager = executor.managers["C"]
        backend.events.append(("run", made.context, manager.capturing))

    phase = Phase("C", run, reads=set(), writes=set(), forward=True, title=title)
    executor = PhaseExecutor([phase], lane, backend, watch)
    executor.capture(report)
    manager = executor.managers.get("C") or CudaGraphManager(backend, "C")
    return Captured(manager, backend, executor.attn_states)


ALL = [
    step_graph(2, GREEDY),
    BatchExecutionDescriptor(P, 8),
    step_graph(8, NOISE),
    BatchExecutionDescriptor(F, 4, 4, 1),
    BatchExecutionDescriptor(P, 64),
    BatchExecutionDescriptor(P, 1),
    step_graph(8, GREEDY),
]


def test_pieces_are_captured_first_and_the_largest_before_the_smaller() -> None:
    manager, _, states = capture_all(ALL)
    order = manager.descriptors
    assert [(d.mode is P, d.num_tokens) for d in order] == [
        (True, 64),
        (True, 8),
        (True, 1),
        (False, 8),
        (False, 8),
        (False, 4),
        (False, 2),
    ]
    assert set(order) == set(ALL) == set(states) and len(order) == len(ALL)
    assert list(states) == order


def test_order_does_not_depend_on_the_order_of_descriptors() -> None:
    keys = []
    for descriptors in (ALL, ALL[::-1], sorted(ALL, key=str)):
        states = capture_all(descriptors).states
        keys.append([(d.mode is P, d.num_tokens) for d in states])
    assert keys[0] == keys[1] == keys[2]


def test_warm_up_has_a_state_of_its_own() -> None:
    _, backend, states = capture_all(ALL)
    per_graph = 5
    assert len(backend.events) == per_graph * len(ALL)
    for start in range(0, len(backend.events), per_graph):
        prepared, warm_up, again, capture, captured = backend.events[start : start + per_graph]
        descriptor = prepared[1]
        assert (prepared[0], again[0], capture) == ("prepare", "prepare", "capture")
        assert prepared[2] is not again[2]
        assert prepared[2].metadata is not again[2].metadata
        assert warm_up == ("run", prepared[2].metadata, False)
        if descriptor.mode is not P:  # layers between pieces run by the context of each replay
            assert captured == ("run", again[2].metadata, True)
        assert again[2] is states[descriptor]


def test_replay_is_by_descriptor_with_its_context() -> None:
    manager, backend, states = capture_all(ALL)
    backend.events.clear()
    context = object()
    for number, descriptor in enumerate(states, start=1):
        manager.replay(replace(descriptor), context)
        assert backend.events[-1] == ("replay", number, context)
    manager.replay(ALL[0])
    assert backend.events[-1][2] is None
    with pytest.raises(MissingGraph, match=r"^C has no graph of PIECEWISE 999 tokens: capture it"):
        manager.replay(BatchExecutionDescriptor(P, 999))


def test_what_a_graph_reads_is_learnt_once_from_its_capture() -> None:
    """Of pieces from the warm-up: stateful layers between them run outside their capture."""
    _, backend, states = capture_all(ALL, watched=True)
    learnt = [event[1] for event in backend.events if event[0] == "learn"]
    assert learnt == [("C", descriptor) for descriptor in states]
    for place, event in enumerate(backend.events):
        if event[0] == "learn":
            run = backend.events[place + 1]
            _, descriptor = event[1]
            assert run[0] == "run"
            assert run[2] == (descriptor.mode is not P), "learnt from the wrong run"


def test_a_watched_replay_is_checked_first_under_its_phases_name() -> None:
    for title, part, label in (
        ("", "", ""),
        ("draft decode", "", "draft decode, "),
        ("draft decode", " 2", "draft decode 2, "),
    ):
        manager, backend, states = capture_all(ALL, watched=True, title=title)
        backend.events.clear()
        descriptor = next(iter(states))
        manager.replay(descriptor, "context", part=part)
        assert backend.events == [
            ("check", ("C", descriptor), f"{label}{descriptor}"),
            ("replay", 1, "context"),
        ]


def test_a_refused_replay_does_not_run() -> None:
    manager, backend, states = capture_all(ALL, watched=True)

    def refuse(key: Any, reader: str) -> None:
        raise ValueError("stale")

    manager.watch.check_reads = refuse  # type: ignore[union-attr, method-assign]
    backend.events.clear()
    with pytest.raises(ValueError, match="stale"):
        manager.replay(next(iter(states)))
    assert backend.events == []


def test_manager_holds_what_it_captured() -> None:
    manager, _, states = capture_all(ALL)
    assert all(manager.holds(replace(descriptor)) for descriptor in states)
    assert not manager.holds(BatchExecutionDescriptor(P, 999))
    assert not CudaGraphManager(FakeBackend()).holds(ALL[0])


def test_what_was_captured_is_dispatched_to() -> None:
    dispatcher, states = Dispatcher(ALL), capture_all(ALL).states
    assert dispatcher.dispatch(BatchShape(3, 3, True, GREEDY)) in states
    assert dispatcher.dispatch(BatchShape(3, 3, True, GREEDY)) == step_graph(8, GREEDY)
    assert dispatcher.dispatch(BatchShape(3, 30, False, GREEDY)) == BatchExecutionDescriptor(P, 64)


def test_progress_is_reported() -> None:
    reports: list[tuple[str, int, int | None]] = []
    capture_all(ALL, report=lambda *report: reports.append(report))
    assert [report[1:] for report in reports] == [(n, 7) for n in range(1, 8)]
    assert {report[0] for report in reports} == {"capturing graphs"}


def test_nothing_to_capture() -> None:
    _, backend, states = capture_all([])
    assert (states, backend.events) == ({}, [])
    assert Dispatcher([]).dispatch(BatchShape(1, 1, True, GREEDY)).mode is N


def test_manager_is_not_capturing_after_an_error() -> None:
    manager = CudaGraphManager(FakeBackend())

    def run(state: object) -> None:
        if manager.capturing:
            raise ValueError("in capture")

    with pytest.raises(ValueError, match="in capture"):
        manager.capture(ALL[0], object, run)
    assert manager.capturing is False


@pytest.mark.parametrize("shared", [False, True], ids=["fresh state", "the warm-up's state"])
def test_lazily_planned_metadata_is_planned_in_the_graph(shared: bool) -> None:
    """With the warm-up's state in the graph, the plan would be stale: the bug of PR 42444."""
    lengths, out = torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64)
    plan = torch.zeros(3, dtype=torch.int64)  # persistent: nothing may escape a capture
    warm = AttentionState(None, {})

    def prepare() -> AttentionState:
        return warm if shared else AttentionState(None, {})

    def run(state: AttentionState) -> None:
        if "plan" not in state.metadata:
            plan.copy_(lengths.cumsum(0))
            state.metadata["plan"] = True
        out.copy_(plan)

    graph = BatchExecutionDescriptor(F, 3, 3, 1)
    manager = CudaGraphManager(TapeBackend())
    with torch.inference_mode():
        manager.capture(graph, prepare, run)
    lengths.copy_(torch.tensor([10, 10, 10]))
    manager.replay(graph)
    assert out.tolist() == ([1, 3, 6] if shared else [10, 20, 30])
