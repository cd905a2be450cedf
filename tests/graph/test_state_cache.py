"""The prefix cache of models with recurrent layers: with it and without, answers are the same."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM, SamplingParams
from stoop.batch.staging import StagedWrites
from stoop.core.request import PrefixNode, Request
from stoop.core.step import StateCopies
from stoop.graph.sanitizer import UnwrittenRead
from stoop.models import registry
from stoop.scheduler.hybrid import HybridPrefixCache
from stoop.scheduler.prefix_cache import PrefixCache
from stoop.scheduler.snapshots import SnapshotIndex
from stoop.worker import snapshots as snapshots_module
from stoop.worker.snapshots import SnapshotPool
from support import running_sum
from support.checkpoints import save_checkpoint
from support.engines import generate_ids, make_llm

MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise", "step")
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "max_model_len": 60,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,  # long prompts come in chunks that end inside blocks
    "block_size": 4,  # as long as the log of 4 tokens: short chunks are logged, long ones are not
    "num_kv_blocks": 20,  # too few for all: some are preempted
    "capture_sizes": "1,2,4,24",
    "state_cache_memory": "1MiB",
}
SHARED = [11 * i % 97 for i in range(30)]
# Around blocks; prefixes of each other, and texts that part ways inside and at the end of a block.
PROMPTS = [SHARED[:n] for n in (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 30)]
PROMPTS += [[*SHARED[:n], 90, 91, 92, n] for n in (8, 10, 16, 28)]
PROMPTS += [SHARED[:16], [5, 6, 7] * 6]  # one twice; n-grams find drafts in the last

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", autouse=True)
def _family() -> Iterator[None]:
    """Registered for these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_families", dict(registry._families))
        registry.register_model(running_sum.FAMILY)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "running-sum": running_sum.write_checkpoint(root / "running-sum"),
        **{
            name: save_checkpoint(root / name, name, dtype="float64")
            for name in ("lfm2", "granite-hybrid", "qwen3.5")
        },
    }


def make(folder: Path, **options: Any) -> LLM:
    return make_llm(folder, **(SETTINGS | options))


Answers = list[list[list[int]]]


def rounds(llm: LLM) -> Answers:
    """All prompts, again, and once more with their answers and another turn."""
    first = generate_ids(llm, PROMPTS, GREEDY)
    second = generate_ids(llm, list(reversed(PROMPTS)), GREEDY)
    turns = [prompt + answer + [3, 1] for prompt, answer in zip(PROMPTS, first, strict=True)]
    return [first, second, generate_ids(llm, turns, GREEDY)]


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Answers]:
    """One request at a time, whole prompts, and no cache."""
    alone: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 60,
        "enable_prefix_caching": False,
    }
    return {name: rounds(make(folder, **alone)) for name, folder in folders.items()}


EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
CASES = [("running-sum", "none"), ("running-sum", "step")]
if EVERY:
    CASES += [*(("lfm2", mode) for mode in MODES), ("granite-hybrid", "full"), ("qwen3.5", "step")]
else:  # every mode once or twice
    CASES += [("lfm2", "piecewise"), ("lfm2", "full_decode_only"), ("lfm2", "step")]
    CASES += [("qwen3.5", "full_and_piecewise"), ("granite-hybrid", "full")]
SPECS = (None, NGRAM)
# With and without drafts by turns, or both.
CROSSED = [
    pytest.param(model, mode, spec, id=f"{model}-{mode}-{'ngram' if spec else 'plain'}")
    for number, (model, mode) in enumerate(CASES)
    for spec in (SPECS if EVERY else [SPECS[number % 2]])
]


@pytest.mark.parametrize(("model", "mode", "spec"), CROSSED)
def test_answers_are_the_same_with_and_without(
    folders: dict[str, Path], expected: dict[str, Answers], model: str, mode: str, spec: Any
) -> None:
    """With graphs under the sanitizer: a slot is NaN before its snapshot is restored."""
    llm = make(
        folders[model],
        graph_mode=mode,
        speculative_config=spec,
        sanitize=mode != "none",
        run_ahead=0 if mode == "none" else 2,
    )
    assert rounds(llm) == expected[model]
    metrics = llm.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["prefix_cache_hit_tokens"] > 200
    assert metrics["state_cache_snapshots_restored"] > 15
    taken, held = (metrics[f"state_cache_snapshots_{name}"] for name in ("taken", "held"))
    assert 10 < held <= taken
    if spec is not None:
        assert metrics["spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 5}, {"run_ahead": 1}, {"few": 2}])
def test_small_budgets_and_few_snapshots(
    folders: dict[str, Path], expected: dict[str, Answers], options: dict[str, Any]
) -> None:
    options = dict(options)
    few = options.pop("few", None)
    if few is not None:
        size = make(folders["lfm2"]).engine.runner.state_layout.slot_bytes
        options["state_cache_memory"] = few * size + 1
    llm = make(folders["lfm2"], **options)
    if few is not None:
        assert llm.metrics()["state_cache_snapshots"] == few
    assert rounds(llm) == expected["lfm2"]
    assert llm.metrics()["prefix_cache_hit_tokens"] > 20


def test_several_answers_of_a_prompt(folders: dict[str, Path]) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)

    def answers(**options: Any) -> list[list[list[int]]]:
        llm = make(folders["lfm2"], speculative_config=NGRAM, **options)
        found = []
        for _ in range(2):
            outputs = llm.generate(PROMPTS[-6:], params, use_tqdm=False)
            found.append([list(o.token_ids) for output in outputs for o in output.outputs])
        assert bool(llm.metrics()["prefix_cache_hit_tokens"]) == ("enable" not in str(options))
        return found

    assert answers() == answers(enable_prefix_caching=False)


def test_the_end_of_an_answer_is_a_prefix_of_the_next_turn(folders: dict[str, Path]) -> None:
    llm = make(folders["lfm2"])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (answer,) = generate_ids(llm, [SHARED[:9]], params)  # 16 tokens are computed at the end
    before = llm.metrics()["prefix_cache_hit_tokens"]
    (found,) = generate_ids(llm, [SHARED[:9] + answer + [1, 2]], GREEDY)
    assert llm.metrics()["prefix_cache_hit_tokens"] - before == 16
    plain = make(folders["lfm2"], enable_prefix_caching=False)
    assert generate_ids(plain, [SHARED[:9] + answer + [1, 2]], GREEDY) == [found]


def test_a_reset_forgets_all_snapshots(folders: dict[str, Path]) -> None:
    llm = make(folders["lfm2"])
    first = generate_ids(llm, [SHARED], GREEDY)
    assert llm.metrics()["state_cache_snapshots_held"] > 0
    assert llm.reset_prefix_cache()
    assert llm.metrics()["state_cache_snapshots_held"] == 0
    assert generate_ids(llm, [SHARED], GREEDY) == first
    assert llm.metrics()["prefix_cache_hit_tokens"] == 0
    assert generate_ids(llm, [SHARED], GREEDY) == first
    assert llm.metrics()["prefix_cache_hit_tokens"] == 28


def test_a_failed_step_forgets_all_snapshots(folders: dict[str, Path], monkeypatch: Patch) -> None:
    """What it was to save may be half written."""
    llm = make(folders["lfm2"])
    expected = generate_ids(llm, [SHARED], GREEDY)

    def fails(self: SnapshotPool, copies: StateCopies) -> None:
        raise RuntimeError("the device says no")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotPool, "save", fails)
        with pytest.raises(RuntimeError, match="says no"):
            generate_ids(llm, [[*SHARED[::-1]]], GREEDY)
    assert llm.metrics()["state_cache_snapshots_held"] == 0
    assert generate_ids(llm, [SHARED], GREEDY) == expected


def test_the_cache_is_off_by_default_on_a_cpu(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for value in (None, 0, "0"):
        with caplog.at_level("INFO"):
            llm = make(folders["lfm2"], state_cache_memory=value)
        assert "prefix caching is off: the model's layers have recurrent state; state_" in (
            caplog.text
        )
        caplog.clear()
        assert llm.metrics()["state_cache_snapshots"] == 0
        assert not llm.engine.scheduler.prefix_cache.enabled


def test_switched_off_prefix_caching_wins(folders: dict[str, Path]) -> None:
    llm = make(folders["lfm2"], enable_prefix_caching=False, state_cache_memory="1MiB")
    assert llm.metrics()["state_cache_snapshots"] == 0
    generate_ids(llm, [SHARED] * 2, GREEDY)
    assert llm.metrics()["prefix_cache_hit_tokens"] == 0


def test_copies_in_parts(
    folders: dict[str, Path], expected: dict[str, Answers], monkeypatch: Patch
) -> None:
    """As for states larger than the temporary."""
    monkeypatch.setattr(snapshots_module, "_PART_BYTES", 100)
    assert rounds(make(folders["lfm2"])) == expected["lfm2"]


# ---- bugs put back ----


def publish_at_a_wrong_length(patch: Patch) -> None:
    take = SnapshotIndex.take

    def mutant(self: SnapshotIndex, request: Request, node: PrefixNode, step: int) -> int | None:
        parent = node.parent
        return None if parent is None or self.expects(parent) else take(self, request, parent, step)

    patch.setattr(SnapshotIndex, "take", mutant)


def restore_without_pending(patch: Patch) -> None:
    def mutant(self: SnapshotPool, copies: StateCopies) -> None:
        slots, snapshots = self._pair(1, copies.restores)
        self.slots[slots] = self.rows[snapshots]

    patch.setattr(SnapshotPool, "restore", mutant)


def save_without_pending(patch: Patch) -> None:
    def mutant(self: SnapshotPool, copies: StateCopies) -> None:
        slots, snapshots = self._pair(2, copies.saves)
        self.rows[snapshots] = self.slots[slots]
        self.pending[snapshots] = 0

    patch.setattr(SnapshotPool, "save", mutant)


def restore_before_the_reset(patch: Patch) -> None:
    """The staged edits come after it, and set the counter to 0."""
    stage, restore = SnapshotPool.stage, SnapshotPool.restore

    def mutant(self: SnapshotPool, staged: StagedWrites, copies: StateCopies) -> None:
        early = StagedWrites(self.rows.device)
        stage(self, early, copies)
        early.apply()
        self.save_ended(copies)
        restore(self, copies)

    patch.setattr(SnapshotPool, "stage", mutant)
    patch.setattr(SnapshotPool, "restore", lambda self, copies: None)


def save_before_the_phases(patch: Patch) -> None:
    restore, save = SnapshotPool.restore, SnapshotPool.save

    def mutant(self: SnapshotPool, copies: StateCopies) -> None:
        restore(self, copies)
        save(self, copies)

    patch.setattr(SnapshotPool, "restore", mutant)
    patch.setattr(SnapshotPool, "save", lambda self, copies: None)


def save_ended_after_the_phases(patch: Patch) -> None:
    """Its slot may have another request by then."""
    save, save_ended = SnapshotPool.save, SnapshotPool.save_ended

    def mutant(self: SnapshotPool, copies: StateCopies) -> None:
        save(self, copies)
        save_ended(self, copies)

    patch.setattr(SnapshotPool, "save", mutant)
    patch.setattr(SnapshotPool, "save_ended", lambda self, copies: None)


def save_ended_with_the_slots_counter(patch: Patch) -> None:
    """The tokens after the end of the block count, too."""

    def mutant(self: SnapshotPool, copies: StateCopies) -> None:
        slots, snapshots = self._pair(0, copies.ended)
        self.rows[snapshots] = self.slots[slots]
        self.pending[snapshots] = self.slot_pending[slots]

    patch.setattr(SnapshotPool, "save_ended", mutant)


def hit_without_a_snapshot(patch: Patch) -> None:
    patch.setattr(HybridPrefixCache, "match", PrefixCache.match)
    patch.setattr(SnapshotIndex, "use", lambda self, node: self.find(node))


def never_restore(patch: Patch) -> None:
    patch.setattr(SnapshotPool, "restore", lambda self, copies: None)


MUTANTS: list[Callable[[Patch], None]] = [
    publish_at_a_wrong_length,
    restore_without_pending,
    save_without_pending,
    restore_before_the_reset,
    save_before_the_phases,
    save_ended_after_the_phases,
    save_ended_with_the_slots_counter,
    hit_without_a_snapshot,
    never_restore,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
@pytest.mark.parametrize("model", ["running-sum", "lfm2"])
def test_a_mutant_is_caught(
    folders: dict[str, Path],
    expected: dict[str, Answers],
    monkeypatch: Patch,
    model: str,
    mutant: Callable[[Patch], None],
) -> None:
    mutant(monkeypatch)
    llm = make(folders[model], speculative_config=NGRAM)
    assert rounds(llm) != expected[model]


@pytest.mark.parametrize("mutant", [never_restore, hit_without_a_snapshot])
def test_the_sanitizer_sees_a_state_that_nothing_restored(
    folders: dict[str, Path], monkeypatch: Patch, mutant: Callable[[Patch], None]
) -> None:
    mutant(monkeypatch)
    llm = make(folders["lfm2"], graph_mode="full", sanitize=True)
    with pytest.raises(UnwrittenRead):
        rounds(llm)
