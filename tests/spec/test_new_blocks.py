"""New KV blocks are zeroed for a backend that reads masked values.

Before every step, free blocks and those that the step hands out hold NaN. The backend multiplies
the values of masked keys by 0, as FlashInfer's kernels do, so one NaN among them spoils the step.
"""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stoop
from stoop.attention import registry
from stoop.attention.base import AttentionShape
from stoop.attention.hostplan import HostPlanBackend, HostPlanMetadata
from stoop.batch.staging import StagedWrites
from stoop.config import backends
from stoop.config.backends import BackendTraits
from stoop.config.resolve import make_options, resolve
from stoop.core.step import StepPlan
from stoop.graph.sanitizer import UnwrittenRead
from stoop.scheduler.plan import PlanBuilder
from stoop.worker.new_blocks import NewBlocks, fill_blocks
from stoop.worker.runner import ModelRunner
from support.drafters import DrafterStore, Trace, make_spec_llm, run
from support.poisoned_blocks import poison_before_each_step
from support.specs import tiny_spec

Patch = pytest.MonkeyPatch
K = 3


class MaskedReader(HostPlanBackend):
    """It reads the values of all pages of the batch, also past the live tokens, and the null
    block, which pads the list of pages."""

    name = "masked-reader"

    def forward(
        self, shape: AttentionShape, q: Tensor, cache: Tensor, metadata: HostPlanMetadata
    ) -> Tensor:
        values = cache[1].index_select(0, metadata.page_indices)
        return super().forward(shape, q, cache, metadata) + 0 * values.sum()


READER = {"attention_backend": MaskedReader.name}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "BACKENDS", dict(registry.BACKENDS))
        patch.setattr(backends, "_TRAITS", dict(backends._TRAITS))
        stoop.register_backend(BackendTraits(MaskedReader.name, zeroed_cache=True), MaskedReader)
        yield


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("eagle3-random", 0, {}),
    ("eagle3-noisy", K, {}),
    ("eagle3-random", K, {"graph_mode": "step", "sanitize": True}),
    ("eagle3-random", K, {"graph_mode": "full", "run_ahead": 2}),
]
if os.environ.get("STOOP_TEST_ALL"):
    CASES += [
        ("eagle3-noisy", K, {"graph_mode": "full", "sanitize": True}),
        ("eagle3-random", K, {"graph_mode": "step", "run_ahead": 2}),
    ]


@pytest.mark.parametrize(("name", "num_tokens", "options"), CASES)
def test_nan_in_reused_blocks_changes_nothing(
    drafters: DrafterStore,
    eager: Callable[[str, int], Trace],
    name: str,
    num_tokens: int,
    options: dict[str, Any],
) -> None:
    """Neither answers nor drafts, with chunks, preemption and cached prefixes."""
    llm = make_spec_llm(drafters.get(name), num_tokens, **READER, **options)
    assert llm.config.cache.zero_new_blocks
    hits = poison_before_each_step(llm)
    trace, expected = run(llm, num_tokens), eager(name, num_tokens)
    assert trace.answers == eager(name, 0).answers
    if "run_ahead" not in options:  # drafts are recorded by what is known after a launch
        assert trace.drafts == expected.drafts
    assert trace.metrics["num_preemptions"] > 0 and max(hits) > 0


# ---- who asks for zeros ----


def test_only_backends_that_read_masked_values_pay() -> None:
    def asks(backend: str) -> bool:
        options = make_options("x", {"attention_backend": backend})
        return resolve(options, tiny_spec(), "folder", "cpu").cache.zero_new_blocks

    assert asks(MaskedReader.name) and asks("flashinfer")
    assert not any(map(asks, ("reference", "hostplan", "triton", "auto")))
    draft = BackendTraits("leaves-drafts", draft_backend=MaskedReader.name)
    stoop.register_backend(draft, HostPlanBackend)
    assert asks("leaves-drafts")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_are_filled_in_every_dtype(dtype: torch.dtype) -> None:
    cache = torch.ones(2, 6, 4, 1, 8).to(dtype)
    fill_blocks([cache], torch.tensor([1, 2, 4]), math.nan)
    assert cache.float().isnan().all(-1).all(-1).all(-1).tolist() == [[0, 1, 1, 0, 1, 0]] * 2
    staged, new = StagedWrites(cache.device), NewBlocks([cache], 6, cache.device)
    new.stage(staged, [4, 1])
    staged.apply()
    new.zero(2)
    found = cache.float()[:, :, 0, 0, 0].nan_to_num(nan=-1.0)
    assert found.tolist() == [[1, 0, -1, 1, 0, 1]] * 2


# ---- bugs put back ----


def forget_the_list(patch: Patch) -> None:
    patch.setattr(PlanBuilder, "new_blocks", lambda plan: [])


def forget_appends(patch: Patch) -> None:
    """Only prompts get zeroed blocks."""

    def of_admissions(plan: PlanBuilder) -> list[int]:
        return [b for r, start in plan.appended.items() if r in plan.admitted
                for b in r.block_ids[start:]]  # fmt: skip

    patch.setattr(PlanBuilder, "new_blocks", of_admissions)


def forget_the_drafter(patch: Patch) -> None:
    """The last layer is the head's."""
    zero = NewBlocks.zero

    def of_target(self: NewBlocks, count: int) -> None:
        caches, self.caches = self.caches, self.caches[:-1]
        zero(self, count)
        self.caches = caches

    patch.setattr(NewBlocks, "zero", of_target)


def zero_last_steps_blocks(patch: Patch) -> None:
    """The ids are staged after the copy to the device, so the next step zeroes them."""
    put = NewBlocks.stage
    late: list[list[int]] = [[]]

    def stage(self: NewBlocks, staged: StagedWrites, blocks: list[int]) -> None:
        put(self, staged, [*late.pop(), *[0] * len(blocks)][: len(blocks)])
        late.append(blocks)

    patch.setattr(NewBlocks, "stage", stage)


def zero_cached_prefixes(patch: Patch) -> None:
    prepare = ModelRunner.prepare

    def prefixes_too(self: ModelRunner, plan: StepPlan) -> Any:
        cached = {each.slot: each.num_computed // self.block_size for each in plan.admissions}
        shared = [b for a in plan.block_appends for b in a.block_ids[: cached.get(a.slot, 0)]]
        plan.blocks_to_zero.extend(shared)
        return prepare(self, plan)

    patch.setattr(ModelRunner, "prepare", prefixes_too)


MUTANTS: list[tuple[Callable[[Patch], None], bool, str]] = [
    (forget_the_list, True, "hidden"),
    (forget_appends, True, "hidden"),
    (forget_the_drafter, False, "draft features"),
    (zero_last_steps_blocks, True, "hidden"),
    (zero_cached_prefixes, True, ""),  # what is wrong there is wrong in the twin as well
]


@pytest.mark.parametrize(("apply", "in_answers", "buffer"), MUTANTS)
def test_mutant_is_caught(
    drafters: DrafterStore,
    eager: Callable[[str, int], Trace],
    monkeypatch: Patch,
    apply: Callable[[Patch], None],
    in_answers: bool,
    buffer: str,
) -> None:
    """By answers or drafts of its own; by the sanitizer with the buffer's name, with no help of
    this test."""
    apply(monkeypatch)
    drafter, expected = drafters.get("eagle3-random"), eager("eagle3-random", K)
    llm = make_spec_llm(drafter, K, **READER)
    poison_before_each_step(llm)
    trace = run(llm, K)
    assert (trace.answers != expected.answers) == in_answers
    assert trace.drafts != expected.drafts
    if buffer:
        with pytest.raises(UnwrittenRead) as caught:
            run(make_spec_llm(drafter, K, graph_mode="step", sanitize=True, **READER), K)
        assert caught.value.buffer == buffer
