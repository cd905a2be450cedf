"""Bugs in the attention state that draft prefill is captured with: the target's, by identity."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from stoop.attention.hostplan import HostPlanBackend
from stoop.batch.input_batch import InputBatch
from stoop.check.mutants.base import Patch, draft_mutant
from stoop.graph.descriptor import BatchExecutionDescriptor
from stoop.graph.phases import Segment
from stoop.model_state.default import DefaultModelState
from stoop.worker import executor
from stoop.worker.executor import PhaseExecutor


def prefill_with_a_private_builder(patch: Patch) -> None:
    """Draft prefill is captured against buffers that the target's builder does not refresh."""
    capture = PhaseExecutor._capture

    def capture_apart(self: PhaseExecutor, segment: Segment, descriptor: Any) -> None:
        target = self.target.target  # type: ignore[attr-defined]
        setup = target.model_state.setup
        with Patch() as inner:
            if segment.name == "P":
                private = type(setup.backend)(setup.backend.setup)
                other = DefaultModelState(replace(setup, backend=private))
                inner.setattr(target, "model_state", other)
            capture(self, segment, descriptor)

    patch.setattr(PhaseExecutor, "_capture", capture_apart)


def prefill_unguarded(patch: Patch) -> None:
    """A private builder, without the check that refuses it at capture."""
    patch.setattr(executor, "_check_identity", lambda *args: None)
    prefill_with_a_private_builder(patch)


class _Opaque:
    """Metadata that no generic walk can look into, such as FlashInfer's wrappers."""

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata


def prefill_with_an_opaque_private_builder(patch: Patch) -> None:
    """A private builder whose metadata shows no tensor: what its backend declares gives it away."""
    build, forward = HostPlanBackend.build, HostPlanBackend.forward

    def opaque(self: HostPlanBackend, batch: InputBatch, for_capture: bool = False) -> _Opaque:
        return _Opaque(build(self, batch, for_capture))

    def attend(self: HostPlanBackend, shape: Any, q: Any, cache: Any, metadata: _Opaque) -> Any:
        return forward(self, shape, q, cache, metadata.metadata)

    patch.setattr(HostPlanBackend, "build", opaque)
    patch.setattr(HostPlanBackend, "forward", attend)
    prefill_with_a_private_builder(patch)


Job = tuple[Segment, BatchExecutionDescriptor]


def change_prefill_jobs(change: Callable[[BatchExecutionDescriptor], Any]) -> Any:
    """Graphs of draft prefill are captured for other descriptors; for None not at all."""

    def apply(patch: Patch) -> None:
        jobs = PhaseExecutor._jobs

        def changed(self: PhaseExecutor) -> Iterator[Job]:
            for segment, descriptor in jobs(self):
                own = change(descriptor) if segment.name == "P" else descriptor
                if own is not None:
                    yield segment, own

        patch.setattr(PhaseExecutor, "_jobs", changed)

    return apply


def forget_the_query_len(descriptor: BatchExecutionDescriptor) -> BatchExecutionDescriptor:
    """A key that the target's states are not stored under."""
    return replace(descriptor, query_len=None)


def skip_pairs(descriptor: BatchExecutionDescriptor) -> BatchExecutionDescriptor | None:
    return None if descriptor.num_reqs == 2 else descriptor


def look_prefill_up_by_another_size(patch: Patch) -> None:
    """Draft prefill is replayed by a graph of another size than its batch's metadata has."""
    find = PhaseExecutor._descriptor

    def larger(self: PhaseExecutor, segment: Segment, step: Any) -> BatchExecutionDescriptor:
        descriptor = find(self, segment, step)
        if segment.name == "P" and segment.captured:
            return max(self.managers["P"].descriptors, key=lambda each: each.num_tokens)
        return descriptor

    patch.setattr(PhaseExecutor, "_descriptor", larger)


def rebuild_before_prefill(patch: Patch) -> None:
    """The target's metadata is built once more for draft prefill: right, but slow."""
    replay = PhaseExecutor._replay

    def rebuilding(self: PhaseExecutor, segment: Segment, step: Any, descriptor: Any) -> None:
        if segment.name == "P":
            model_state = self.target.target.model_state  # type: ignore[attr-defined]
            step = replace(step, metadata=model_state.prepare_attn(step.batch))
        replay(self, segment, step, descriptor)

    patch.setattr(PhaseExecutor, "_replay", rebuilding)


MUTANTS = (
    draft_mutant(
        "prefill with a private builder",
        prefill_with_a_private_builder,
        "full",
        "hostplan",
        refusal="build both by one builder",
        mechanism=1,
        report=40410,
    ),
    draft_mutant(
        "prefill with a private builder",
        prefill_with_a_private_builder,
        "full",
        refusal="another `plan_version` than the target's: build both by one builder",
        mechanism=1,
        report=40410,
    ),
    draft_mutant(
        "prefill with a private builder",
        prefill_with_a_private_builder,
        "full",
        "flashinfer",
        refusal="build both by one builder",
        mechanism=1,
        report=40410,
    ),
    draft_mutant(
        "prefill with a private builder that hides its tensors",
        prefill_with_an_opaque_private_builder,
        "full",
        "hostplan",
        refusal="another `page_indptr` than the target's: build both by one builder",
        mechanism=1,
        report=40410,
    ),
    draft_mutant(
        "prefill with a private builder, unguarded",
        prefill_unguarded,
        "full_decode_only",
        "hostplan",
        mechanism=1,
        report=40410,
        buffer="token_ids",
    ),
    draft_mutant(
        "prefill captured under another key",
        change_prefill_jobs(forget_the_query_len),
        "full_decode_only",
        refusal="has no attention state of the target's to read",
        mechanism=1,
        report=40410,
        any_backend=True,
    ),
    draft_mutant(
        "prefill not captured for a size",
        change_prefill_jobs(skip_pairs),
        "full",
        refusal="draft prefill has no graph of FULL 8 tokens, 2 reqs, 4 a request",
        mechanism=1,
        report=40410,
        any_backend=True,
    ),
    draft_mutant(
        "prefill looked up by another size",
        look_prefill_up_by_another_size,
        "full",
        refusal="look every graph up by the batch's own descriptor",
        mechanism=1,
        report=40410,
        any_backend=True,
    ),
    draft_mutant(
        "metadata built again for prefill",
        rebuild_before_prefill,
        "full",
        "hostplan",
        by_sanitizer=False,
        by_equality=False,
        by_builds=True,
        report=40410,
    ),
)
