"""Drafts are those of the slow reference drafter; a head that is right is worth K + 1 tokens."""

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoop import LLM
from stoop.check.workloads import GREEDY, SEEDED, Trace, watch_drafts
from stoop.checkpoint import toy
from stoop.checkpoint.weights import WeightReader
from stoop.graph.descriptor import RunMode
from stoop.models.head_source import stored_names
from stoop.spec.eagle import EagleSpeculator
from support.drafters import BACKENDS, DrafterStore, make_spec_llm, prompts, run
from support.reference_drafter import ReferenceDrafter, TargetReference

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))
HEADS = ("eagle-random", "eagle3-random", "eagle3-variant", "eagle-noisy", "eagle3-noisy")


def references(llm: LLM) -> tuple[TargetReference, ReferenceDrafter]:
    """Plain torch, from the checkpoints and the head's specification alone."""
    config = llm.config
    assert config.spec is not None and config.head is not None and config.spec.folder is not None
    with WeightReader(config.load.folder) as reader:
        target = {name: reader.tensor(name).double() for name in reader.names()}
    with WeightReader(config.spec.folder) as reader:
        names = stored_names(reader.names(), tied=False)
        head = {name: _double(reader.tensor(stored)) for name, stored in names.items()}
    drafter = ReferenceDrafter(
        config.head, head, target["model.embed_tokens.weight"], target["lm_head.weight"]
    )
    return TargetReference(config.model, target, config.head.taps or (0,)), drafter


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def watch_logits(llm: LLM, patch: pytest.MonkeyPatch) -> dict[tuple[int, int, int], Tensor]:
    """By slot, known tokens and number of the draft: the logits that it was chosen from."""
    found: dict[tuple[int, int, int], Tensor] = {}
    speculator = llm.engine.runner.speculator
    assert isinstance(speculator, EagleSpeculator)
    head, slots, step = speculator.head, speculator.setup.slots, speculator.setup.buffers.step
    logits_of: Callable[[Tensor], Tensor] = head.logits

    def spy(states: Tensor) -> Tensor:
        logits = logits_of(states)
        for row, slot in enumerate(step.row_slots[: logits.shape[0]].tolist()):
            key = (slot, int(slots.num_tokens[slot]), int(slots.num_drafts[slot]))
            if step.samples[row]:
                found.setdefault(key, logits[row].clone())
        return logits

    patch.setattr(head, "logits", spy)
    return found


def by_turns(names: Sequence[Any]) -> list[tuple[Any, str]]:
    """Each with one backend, or both."""
    if EVERY:
        return list(itertools.product(names, BACKENDS))
    return [(name, BACKENDS[number % 2]) for number, name in enumerate(names)]


@pytest.mark.parametrize(("name", "backend"), by_turns(HEADS))
def test_drafts_equal_the_slow_reference_drafters(
    drafters: DrafterStore, name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No paging, no batch, no cache there: tokens are equal and logits within 1e-4."""
    likeliest = {"draft_sample_method": "greedy"}
    llm = make_spec_llm(drafters.get(name), 4, attention_backend=backend, spec=likeliest)
    trace = Trace()
    watch_drafts(llm, trace)
    logits = watch_logits(llm, monkeypatch)
    target, drafter = references(llm)
    texts: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts(toy.SIZE)):
        params = SEEDED if number % 2 else GREEDY
        (output,) = llm.generate([prompt], params)  # alone: its slot's logits are its own
        texts[f"{number}/0"] = prompt + list(output.outputs[0].token_ids)
        _compare(texts[f"{number}/0"], f"{number}/0", trace, logits, target, drafter)
        logits.clear()
    assert sum(len(drafts) == 4 for drafts in trace.drafts.values()) > 30


def _compare(
    text: list[int],
    request_id: str,
    trace: Trace,
    logits: dict[tuple[int, int, int], Tensor],
    target: TargetReference,
    drafter: ReferenceDrafter,
) -> None:
    for (owner, known), drafts in trace.drafts.items():
        if owner != request_id or not drafts or known > len(text):
            continue
        taps, normed, _ = target.streams(text[: known - 1])
        features = taps if drafter.spec.taps else normed
        expected, expected_logits = drafter.draft(text[:known], features, len(drafts))
        assert drafts == expected
        for number in range(len(drafts)):
            (ours,) = [v for (_, n, d), v in logits.items() if (n, d) == (known, number)]
            torch.testing.assert_close(ours, expected_logits[number], rtol=0, atol=1e-4)


RUNS = [("none", 3), ("none", 16), ("step", 2), ("step", 1), ("step", 5), ("step", 8)]


@pytest.mark.parametrize(
    ("name", "mode", "num_tokens"),
    [
        (name, *each)
        for place, name in enumerate(("eagle-right", "eagle3-right"))
        for number, each in enumerate(RUNS)
        if EVERY or number % 2 == place
    ],
)
def test_a_head_that_is_always_right_gives_k_plus_1_tokens_a_step(
    drafters: DrafterStore, name: str, num_tokens: int, mode: str
) -> None:
    options: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 80}
    options |= {"max_num_batched_tokens": 80, "graph_mode": mode}
    if mode == "step":
        options["capture_sizes"] = "1,4"
    llm = make_spec_llm(drafters.get(name), num_tokens, **options)
    rounds = 5
    params = GREEDY.replace(max_tokens=1 + rounds * (num_tokens + 1))
    for count in (1, 3):
        before = llm.metrics()["num_steps"]
        outputs = llm.generate(prompts(toy.SIZE)[:count], params)
        # One step for the prompt and its first token, then whole runs.
        assert llm.metrics()["num_steps"] - before == 1 + rounds
        for output in outputs:
            (answer,) = output.outputs
            assert answer.token_ids == _walk(output.prompt_token_ids[-1], params.max_tokens)
            assert answer.spec is not None
            assert answer.spec.num_accepted_tokens_per_pos == [rounds] * num_tokens
            assert answer.spec.mean_acceptance_length == num_tokens + 1


def _walk(token: int, count: int | None) -> list[int]:
    assert count is not None
    walk = []
    for _ in range(count):
        token = toy.successor(token)
        walk.append(token)
    return walk


def test_a_head_that_knows_some_tokens_is_right_for_those(drafters: DrafterStore) -> None:
    """Acceptance by position is what the known tokens say, draft by draft."""
    llm = make_spec_llm(drafters.get("eagle3-some"), 3, max_model_len=256, num_kv_blocks=80)
    prompt = [4]
    (output,) = llm.generate([prompt], GREEDY.replace(max_tokens=100))
    answer, expected, known = output.outputs[0], [0, 0, 0], 1
    tokens, num_steps = answer.token_ids, 0
    while known < 100:
        room = min(3, 100 - 1 - known)
        run_length = 0
        while run_length < room and tokens[known + run_length] % 7:
            expected[run_length] += 1
            run_length += 1
        known += run_length + 1
        num_steps += room > 0
    assert answer.spec is not None
    assert answer.spec.num_accepted_tokens_per_pos == expected
    assert answer.spec.num_drafts == num_steps
    assert 0 < expected[2] <= expected[1] <= expected[0] <= num_steps and expected[2] < num_steps


def test_drafts_stop_at_the_heads_own_position_limit(drafters: DrafterStore, tmp_path: Any) -> None:
    """Past it the head was not trained: its requests go on without drafts, others keep theirs."""
    right = drafters.get("eagle3-right")
    head = toy.write_head(tmp_path / "short", "eagle3", max_position=32)
    short = type(right)(right.target, "eagle3", head)
    llm, plain = make_spec_llm(short, 3), make_spec_llm(short, 0)
    trace = Trace()
    watch_drafts(llm, trace)
    batch = [[5] * 20, [6] * 2]
    params = [GREEDY.replace(max_tokens=40), GREEDY.replace(max_tokens=20)]
    ours = [o.outputs[0].token_ids for o in llm.generate(batch, params)]
    assert ours == [o.outputs[0].token_ids for o in plain.generate(batch, params)]
    for (owner, known), drafts in trace.drafts.items():
        assert known + len(drafts) <= 32 or not drafts, (owner, known, drafts)
    assert any(len(drafts) == 3 for drafts in trace.drafts.values())
    assert any(known > 40 and not drafts for (_, known), drafts in trace.drafts.items())


def test_a_request_may_lower_its_drafts_and_the_batch_keeps_its_graph(
    drafters: DrafterStore,
) -> None:
    llm = make_spec_llm(drafters.get("eagle3-right"), 3, graph_mode="step", sanitize=True)
    used = []
    llm.engine.runner.executor.on_replay.append(lambda name, descriptor: used.append(descriptor))
    batch = [[5], [6], [7], [8]]
    params = [GREEDY.replace(num_speculative_tokens=n, max_tokens=9) for n in (0, 1, 2, 3)]
    outputs = llm.generate(batch, params)
    rounds = [o.outputs[0].spec for o in outputs]
    assert rounds[0] is not None and rounds[0].num_drafts == 0
    assert [r.num_accepted_tokens_per_pos for r in rounds[1:] if r] == [
        [4, 0, 0],
        [3, 2, 0],  # the last run is cut by max_tokens
        [2, 2, 2],
    ]
    assert {d.query_len for d in used if d.sampling is not None} == {4}
    assert {d.num_reqs for d in used if d.sampling is not None} == {1, 2, 4}


def test_runs_end_inside_the_reserved_blocks(drafters: DrafterStore) -> None:
    """The whole workload with every block beyond a request's own poisoned: see the sanitizer."""
    llm = make_spec_llm(drafters.get("eagle3-right"), 8, graph_mode="full", sanitize=True)
    trace = run(llm, 8)
    assert max(known for _, known in trace.drafts) == 72


def test_the_largest_capture_size_bounds_draft_decodes_too(drafters: DrafterStore) -> None:
    sizes = {"capture_sizes": None, "max_capture_size": 3}
    llm = make_spec_llm(drafters.get("eagle3-right"), 3, graph_mode="full_decode_only", **sizes)
    runner = llm.engine.runner
    assert isinstance(runner.speculator, EagleSpeculator)
    for lane in (runner.lane, runner.speculator.lane):
        assert [descriptor.num_reqs for descriptor in lane.descriptors] == [1, 2, 3]


@pytest.mark.parametrize(
    ("mode", "name"),
    by_turns(["full", "piecewise", "full_and_piecewise", "step", "full_decode_only"]),
)
def test_draft_decodes_are_whole_or_eager(drafters: DrafterStore, mode: str, name: str) -> None:
    """Never in pieces; padded tokens are padded requests, in graphs and in every batch."""
    llm = make_spec_llm(drafters.get("eagle3-right"), 3, graph_mode=mode, attention_backend=name)
    speculator = llm.engine.runner.speculator
    assert isinstance(speculator, EagleSpeculator)
    descriptors = speculator.lane.descriptors
    assert (not descriptors) == (mode == "piecewise")
    for descriptor in descriptors:
        assert descriptor.mode is RunMode.FULL
        assert descriptor.num_tokens == descriptor.num_reqs and descriptor.query_len == 1
    seen = []
    backend = llm.engine.runner.draft_state.backend
    build = backend.build

    def spy(batch: Any, for_capture: bool = False) -> Any:
        seen.append((batch.num_tokens, batch.num_reqs))
        seen.append((batch.num_tokens_padded, batch.num_reqs_padded))
        return build(batch, for_capture)

    backend.build = spy  # type: ignore[method-assign]
    llm.generate(prompts(toy.SIZE)[:3], GREEDY)
    assert len(seen) > 6 and all(tokens == reqs for tokens, reqs in seen)


@pytest.mark.parametrize("method", ["greedy", "coupled", "probabilistic"])
def test_a_head_that_overflows_changes_no_answer(
    drafters: DrafterStore, tmp_path: Any, method: str
) -> None:
    """NaN and infinite logits are drafts like others: refused, and nothing else."""
    right = drafters.get("eagle3-right")
    head = toy.write_head(tmp_path / "broken", "eagle3")
    tensors = load_file(head / "model.safetensors")
    tensors["lm_head.weight"][::2] = float("nan")
    tensors["lm_head.weight"][1::4] = float("inf")
    save_file(tensors, head / "model.safetensors")
    broken = type(right)(right.target, "eagle3", head)
    llm = make_spec_llm(broken, 3, spec={"draft_sample_method": method})
    for params in (GREEDY, SEEDED):
        (output,) = llm.generate([[5]], params)
        assert output.outputs[0].token_ids == _walk(5, params.max_tokens)
