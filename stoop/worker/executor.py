"""Runs the phases of a step: eagerly, as captured graphs, or as the eager twin of those graphs."""

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stoop.batch.input_batch import InputBatch
from stoop.core.report import Report
from stoop.core.sampling_kind import SamplingKind
from stoop.graph.descriptor import BatchExecutionDescriptor, RunMode
from stoop.graph.dispatch import BatchShape
from stoop.graph.manager import CudaGraphManager, GraphBackend, GraphWatch
from stoop.graph.phases import AttentionState, Lane, Phase, Segment, cut
from stoop.graph.refusals import CaptureError, MissingGraph
from stoop.layers.stateful import BreakingContext, ForwardContext
from stoop.sampling.sampler import SamplingNeeds
from stoop.spec.base import Pass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """A batch, and how it goes through the phases."""

    batch: InputBatch
    descriptor: BatchExecutionDescriptor
    metadata: Any  # of the target's states
    needs: SamplingNeeds
    num_drafts: int  # drafts that it makes for the next one
    wants_scores: bool = False


class TargetLane(Protocol):
    """The target's own kind of batch."""

    descriptors: Sequence[BatchExecutionDescriptor]
    max_reqs: int

    def dispatch(self, shape: BatchShape) -> BatchExecutionDescriptor: ...

    def capture_state(self, descriptor: BatchExecutionDescriptor) -> AttentionState: ...

    def context(self, metadata: Any) -> ForwardContext: ...


States = Mapping[Lane | None, AttentionState]  # of a capture, by lane


class PhaseExecutor:
    """Cuts the list of phases by graph mode, and runs, captures, replays and twins the segments.

    vLLM: PrefillEagleCudaGraphManager for segment P, DecodeEagleCudaGraphManager for segment D.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        target: TargetLane,
        backend: GraphBackend,
        watch: GraphWatch | None = None,
        draft_counts: Sequence[int] = (0,),
    ) -> None:
        """draft_counts: how many drafts steps may make, in rising order"""
        self.phases = tuple(phases)
        self.draft_counts = tuple(draft_counts)
        self.target = target
        self.backend = backend
        self.watch = watch
        self.managers: dict[str, CudaGraphManager] = {}  # by `_key`, mostly the segment's name
        self.attn_states: dict[BatchExecutionDescriptor, AttentionState] = {}  # the target's
        # Called before each replay with the segment's name and the descriptor.
        self.on_replay: list[Callable[[str, BatchExecutionDescriptor], None]] = []
        self._segments: dict[tuple[RunMode, int, bool], list[Segment]] = {}
        self._captured: list[States] = []  # graphs read them: they stay

    @property
    def max_drafts(self) -> int:
        return self.draft_counts[-1]

    def segments(self, mode: RunMode, num_drafts: int, masked: bool = False) -> list[Segment]:
        """Of steps that make so many drafts."""
        found = self._segments.get((mode, num_drafts, masked))
        if found is None:
            phases = (phase.for_drafts(num_drafts) for phase in self.phases)
            found = cut(mode, [phase for phase in phases if phase is not None], masked)
            self._segments[mode, num_drafts, masked] = found
        return found

    def _segments_of(self, step: Step) -> list[Segment]:
        num_drafts, descriptor = step.num_drafts, step.descriptor
        if descriptor.mode is RunMode.STEP:  # its graph drafts in any case
            num_drafts = self._drafts_in(descriptor)
        return self.segments(descriptor.mode, num_drafts, step.needs.masked)

    def _drafts_in(self, descriptor: BatchExecutionDescriptor) -> int:
        """Drafts that are made where a graph of this descriptor is replayed. A decode batch makes
        as many as it has places for; other graphs serve any number."""
        if descriptor.query_len is None:
            return self.max_drafts
        return descriptor.query_len - 1

    # ---- a step ----

    def run(self, step: Step, on_update: Callable[[], None] | None = None) -> None:
        """By graphs where there are some. `on_update` is called as soon as the step's tokens are
        known: after phase U, or after the graph that holds it."""
        for segment in self._segments_of(step):
            if segment.host_call is not None:
                segment.host_call(step.batch)
            descriptor = self._descriptor(segment, step)
            if segment.captured and descriptor.mode is not RunMode.NONE:
                self._replay(segment, step, descriptor)
            else:
                self._run_eagerly(segment, step, descriptor, worst_case=False)
            if on_update is not None and segment.updates:
                on_update()

    def run_twin(self, step: Step) -> None:
        """The same phases eagerly, on the extents and with the bounds of the graphs that `run`
        replays. step: with metadata that has not been used"""
        for segment in self._segments_of(step):
            if segment.host_call is not None:
                segment.host_call(step.batch)
            descriptor = self._descriptor(segment, step)
            in_graph = segment.captured and descriptor.mode is not RunMode.NONE
            self._run_eagerly(segment, step, descriptor, worst_case=in_graph)

    def run_phases(self, step: Step, skip: str) -> None:
        """All phases but some, eagerly and with worst-case bounds: for profiling."""
        for phase in self.phases:
            if phase.name not in skip:
                self._run_eagerly(Segment((phase,), False), step, step.descriptor, worst_case=True)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Replays in here belong to no step, so they are not watched."""
        watch, self.watch = self.watch, None
        managers = list(self.managers.values())
        for manager in managers:
            manager.watch = None
        try:
            yield
        finally:
            self.watch = watch
            for manager in managers:
                manager.watch = watch

    def replays(self, step: Step) -> bool:
        """Whether any graph serves this step."""
        return any(
            segment.captured and self._descriptor(segment, step).mode is not RunMode.NONE
            for segment in self._segments_of(step)
        )

    def _descriptor(self, segment: Segment, step: Step) -> BatchExecutionDescriptor:
        if segment.lane is None:
            return step.descriptor
        return segment.lane.dispatch(step.batch.num_reqs)

    def _replay(self, segment: Segment, step: Step, descriptor: BatchExecutionDescriptor) -> None:
        manager = self._manager(segment)
        for listener in self.on_replay:
            listener(manager.name, descriptor)
        if segment.lane is None:
            if descriptor is not step.descriptor:
                raise MissingGraph(
                    f"{segment.title or segment.name} would replay {descriptor} for a batch of "
                    f"{step.descriptor}: look every graph up by the batch's own descriptor"
                )
            for phase in segment.phases:
                if phase.lane is not None:
                    inside = _inside(descriptor)
                    self._refresh(phase.lane, step, inside, phase.times)
            manager.replay(descriptor, self.target.context(step.metadata))
            return
        (phase,), lane = segment.phases, segment.lane
        if lane.advances:
            self._refresh(lane, step, descriptor, phase.times)
            manager.replay(descriptor)
            return
        for number in range(1, phase.times + 1):
            self._refresh(lane, step, descriptor, number)
            manager.replay(descriptor, part=f" {number}")

    def _refresh(
        self, lane: Lane, step: Step, descriptor: BatchExecutionDescriptor, number: int
    ) -> AttentionState:
        if self.watch is not None:
            self.watch.begin_draft_decode()
        return lane.live_state(step.batch, descriptor, number)

    def _run_eagerly(
        self,
        segment: Segment,
        step: Step,
        descriptor: BatchExecutionDescriptor,
        *,
        worst_case: bool,
    ) -> None:
        needs, num_drafts = step.needs, step.num_drafts
        if worst_case and segment.captured:
            needs = _needs(descriptor)
            num_drafts = self._drafts_in(step.descriptor)
        for phase in segment.phases:
            if phase.lane is None:
                batch = self._target_batch(step.batch, descriptor, worst_case)
                context = self.target.context(step.metadata)
                phase.run(Pass(batch, context, needs, worst_case, num_drafts))
                continue
            own = descriptor if segment.lane is not None else _inside(descriptor)
            for number in range(1, phase.times + 1):
                state = self._refresh(phase.lane, step, own, number)
                context = phase.lane.context(state)
                phase.run(Pass(state.batch, context, needs, worst_case, num_drafts))

    def _target_batch(
        self, batch: InputBatch, descriptor: BatchExecutionDescriptor, worst_case: bool
    ) -> InputBatch:
        """Phases outside graphs take the live rows. Pieces serve any number of requests, so they
        take all rows."""
        if not worst_case:
            return batch.without_padded_rows()
        if descriptor.mode is RunMode.PIECEWISE:
            return dataclasses.replace(batch, num_reqs_padded=self.target.max_reqs)
        return batch

    # ---- capture ----

    @torch.inference_mode()
    def capture(self, report: Report | None = None) -> None:
        """Pieces before whole graphs, largest first: what follows fits into the memory taken.

        vLLM: GPUModelRunner.capture_model and EagleSpeculator.capture.
        """
        started = time.perf_counter()
        jobs = sorted(self._jobs(), key=lambda job: _capture_order(job[1]))
        for done, (segment, descriptor) in enumerate(jobs):
            self._capture(segment, descriptor)
            if report:
                report("capturing graphs", done + 1, len(jobs))
        if jobs:
            counts = Counter(self._key(segment) for segment, _ in jobs)
            log.info(
                "captured %d graphs (%s) in %.1f s, %.1f MiB",
                len(jobs),
                ", ".join(f"{count} of {name}" for name, count in counts.items()),
                time.perf_counter() - started,
                self.backend.num_bytes / 2**20,
            )

    def _jobs(self) -> Iterator[tuple[Segment, BatchExecutionDescriptor]]:
        """Every graph to capture."""
        for descriptor in self.target.descriptors:
            num_drafts = self._drafts_in(descriptor)
            for segment in self.segments(descriptor.mode, num_drafts, descriptor.masked):
                if segment.captured and segment.lane is None:
                    yield segment, descriptor
        # Segments of other lanes are the same in every mode, but for steps that hold them whole.
        found = {
            self._key(segment): segment
            for num_drafts in self.draft_counts
            for segment in self.segments(RunMode.NONE, num_drafts)
            if segment.lane is not None
        }
        for segment in found.values():
            assert segment.lane is not None
            yield from ((segment, descriptor) for descriptor in segment.lane.descriptors)

    def _capture(self, segment: Segment, descriptor: BatchExecutionDescriptor) -> None:
        manager = self._manager(segment)
        states = manager.capture(
            descriptor,
            lambda: self._capture_states(segment, descriptor),
            lambda states: self._run_captured(manager, segment, descriptor, states),
        )
        self._captured.append(states)
        if None in states:
            self.attn_states.setdefault(descriptor, states[None])

    def _manager(self, segment: Segment) -> CudaGraphManager:
        """The segment's graphs; none before its first capture."""
        key = self._key(segment)
        manager = self.managers.get(key)
        if manager is None:
            manager = CudaGraphManager(self.backend, key, segment.title, self.watch)
            self.managers[key] = manager
        return manager

    def _key(self, segment: Segment) -> str:
        """Names a segment's graphs. One that runs a phase several times holds just so many runs."""
        phase = segment.phases[0]
        if phase.lane is None or not phase.lane.advances:
            return segment.name
        most = self.max_drafts - phase.drafts + 1
        return segment.name if phase.times == most else f"{segment.name}{phase.times}"

    def _capture_states(self, segment: Segment, descriptor: BatchExecutionDescriptor) -> States:
        """Fresh contents for the warm-up, and again for the capture. A second graph of the target's
        lane must read the very buffers that the first one does: one refresh serves both."""
        states: dict[Lane | None, AttentionState] = {}
        for phase in segment.phases:
            if phase.lane is not None and phase.lane not in states:
                own = descriptor if segment.lane is not None else _inside(descriptor)
                states[phase.lane] = phase.lane.capture_state(own)
        if segment.lane is None:  # last: its rows are those in the shared buffers
            states[None] = self.target.capture_state(descriptor)
            known = self.attn_states.get(descriptor)
            if known is not None:
                _check_identity(segment, descriptor, known, states[None])
            elif all(phase.drafts for phase in segment.phases):
                raise CaptureError(
                    f"{segment.title or segment.name} of {descriptor} has no attention state of "
                    "the target's to read: capture both for the same descriptors, the target first"
                )
        return states

    def _run_captured(
        self,
        manager: CudaGraphManager,
        segment: Segment,
        descriptor: BatchExecutionDescriptor,
        states: States,
    ) -> None:
        """The phases that a descriptor's graph holds."""
        needs, num_drafts = _needs(descriptor), self._drafts_in(descriptor)
        if segment.lane is not None:
            num_drafts = segment.phases[0].drafts + segment.phases[0].times - 1
        for phase in segment.phases:
            state, batch = states[phase.lane], states[phase.lane].batch
            if phase.lane is None:
                batch = self._target_batch(batch, descriptor, worst_case=True)
                context = self.target.context(state.metadata)
            else:
                context = phase.lane.context(state)
            if descriptor.mode is RunMode.PIECEWISE and manager.capturing:
                context = BreakingContext(self.backend)
            follows = phase.lane is not None and phase.lane.advances
            for number in range(1, phase.times + 1 if follows else 2):
                if number > 1:
                    assert phase.lane is not None
                    phase.lane.advance(state)
                phase.run(Pass(batch, context, needs, True, num_drafts))


def _needs(descriptor: BatchExecutionDescriptor) -> SamplingNeeds:
    """What a graph holds. One of a pass alone serves every kind of sampling."""
    return SamplingNeeds.of_kind(descriptor.sampling or SamplingKind.FULL, descriptor.masked)


def _inside(descriptor: BatchExecutionDescriptor) -> BatchExecutionDescriptor:
    """Of another lane's phases in a graph of the whole step: as many rows, one token each."""
    num_reqs = descriptor.num_reqs
    assert num_reqs is not None
    return BatchExecutionDescriptor(descriptor.mode, num_reqs, num_reqs, 1, descriptor.sampling)


def _capture_order(descriptor: BatchExecutionDescriptor) -> tuple[bool, int]:
    return (descriptor.mode is not RunMode.PIECEWISE, -descriptor.num_tokens)


def _check_identity(
    segment: Segment,
    descriptor: BatchExecutionDescriptor,
    old: AttentionState,
    new: AttentionState,
) -> None:
    """Refuse tensors other than the target's: in metadata, and among the buffers that its builder
    declares, since a backend may hide them in objects of its own."""
    own = {**_tensors(old.metadata), **old.declared}
    for name, tensor in (_tensors(new.metadata) | {**new.declared}).items():
        if name not in own or tensor.data_ptr() != own[name].data_ptr():
            raise CaptureError(
                f"{segment.title or segment.name} of {descriptor} would read another `{name}` than "
                "the target's: build both by one builder"
            )


def _tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """Every tensor in metadata, by the path of fields, keys and places that leads to it."""
    if isinstance(value, Tensor):
        return {name: value}
    if dataclasses.is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        parts = {getattr(key, "__name__", str(key)): each for key, each in value.items()}
    elif isinstance(value, list | tuple):
        parts = {str(place): each for place, each in enumerate(value)}
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, each in parts.items():
        found |= _tensors(each, f"{name}.{key}" if name else key)
    return found
