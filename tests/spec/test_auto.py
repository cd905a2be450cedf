"""`speculative_config="auto"`: the head that comes with a model, where it pays."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from stoop import LLM, SamplingParams
from stoop.checkpoint import shipped
from stoop.checkpoint.toy import write_head, write_target
from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options
from stoop.engine import choose_drafter as chooser
from stoop.engine import draft_costs
from stoop.engine.choose_drafter import choose_drafter, choose_drafts, expand_auto
from stoop.engine.core import EngineCore
from stoop.engine.draft_costs import CostStore, DraftCosts
from stoop.engine.draft_estimates import usual_rates
from stoop.engine.draft_policy import AdaptiveDrafts
from stoop.engine.eager_costs import EagerCosts
from stoop.engine.step_costs import GraphCosts, StepTime
from stoop.models.registry import read_model_spec
from stoop.worker.runner import ModelRunner

SETTINGS = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 2}
ROOMY = {**SETTINGS, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 9, 3], [5] * 20]
LENGTHS = [1.9, 2.7, 3.4]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that a head comes with."""
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))
    target = str(write_target(tmp_path / "target"))
    head = write_head(tmp_path / "head", "eagle3", max_position=256)
    (head / shipped.LENGTHS).write_text(json.dumps({"tokens_per_step": LENGTHS}))
    shipped.write_fingerprint(Path(target), head)
    monkeypatch.setitem(shipped.SHIPPED, target, head)
    return target


def store_of(target: str, **options: Any) -> CostStore:
    made = make_options(target, {"device": "cpu", **options})
    num_threads = made.num_threads or torch.get_num_threads()
    return CostStore(made, read_model_spec(Path(target)), shipped.SHIPPED[target], num_threads)


def policy_of(llm: LLM) -> AdaptiveDrafts:
    policy = llm.engine.core.drafts
    assert isinstance(policy, AdaptiveDrafts)
    return policy


def costs_of(llm: LLM) -> EagerCosts:
    costs = policy_of(llm).costs
    assert isinstance(costs, EagerCosts)
    return costs


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("times", "lengths", "expected"),
    [
        ([10, 11, 12, 13], [1.9, 2.7, 3.4], (3, 34 / 13)),
        ([10, 11, 20, 40], [1.9, 2.7, 3.4], (1, 19 / 11)),
        ([10, 30, 50, 70], [1.9, 2.7, 3.4], (0, 19 / 30)),
        ([10, 10, 10, 10], [1.04, 1.04, 1.04], (0, 1.04)),  # too little to be worth it
        ([10, 11, 12, 13], [1.9, 2.7], (2, 27 / 12)),  # known for fewer drafts
        ([10, 12, 16, 20], [1.8, 2.4, 3.1], (1, 18 / 12)),  # 1.55 with 3, hardly better
    ],
)
def test_the_fastest_number_of_drafts_is_chosen(
    times: list[float], lengths: list[float], expected: tuple[int, float]
) -> None:
    num_drafts, gain = choose_drafts(times, lengths)
    assert (num_drafts, gain) == (expected[0], pytest.approx(expected[1]))


# ---- at the start ----


def test_a_start_measures_nothing(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built, launched = [], []
    init, launch = ModelRunner.__init__, ModelRunner.launch
    monkeypatch.setattr(ModelRunner, "__init__", lambda *a: built.append(1) or init(*a))
    monkeypatch.setattr(ModelRunner, "launch", lambda *a: launched.append(1) or launch(*a))
    llm = LLM(target, **SETTINGS)
    assert (built, launched) == ([1], [])
    assert llm.config.spec is not None and llm.config.spec.num_drafts == chooser.CPU_DRAFTS
    assert policy_of(llm).counts == (0, 1, 2, 3)
    assert llm.config.draft_note == "the head that ships with stoop"
    assert llm.metrics()["spec_decode_policy"] == "3 drafts until it is known what they cost"


def test_a_head_that_paid_is_used_with_the_best_number_of_drafts(target: str) -> None:
    store_of(target).add(DraftCosts({0: 10.0, 3: 22.0}))
    llm = LLM(target, **SETTINGS)
    assert llm.config.spec is not None and llm.config.spec.num_drafts == chooser.CPU_DRAFTS
    assert llm.config.draft_note == (
        "the head that ships with stoop: about 1.5x as fast here at usual acceptance, by what "
        "earlier runs measured"
    )
    said = "3 drafts at 1 request, as far as measured"
    assert llm.metrics()["spec_decode_policy"] == said
    plain = LLM(target, **SETTINGS, speculative_config=None)
    assert plain.config.spec is None and plain.config.draft_note == ""
    assert answers(llm) == answers(plain)
    assert llm.metrics()["spec_decode_num_accepted_tokens"] > 0


def test_with_graphs_the_best_number_is_made_in_every_step(target: str) -> None:
    """A tape is captured for one number of drafts, unless the user asks for more."""
    store_of(target).add(DraftCosts({0: 10.0, 3: 22.0}))
    llm = LLM(target, **SETTINGS, graph_mode="step")
    assert llm.config.spec is not None and llm.config.spec.num_drafts == 2
    assert llm.engine.core.drafts is None


def test_costs_of_a_single_number_of_drafts_decide_nothing(target: str) -> None:
    store_of(target).add(DraftCosts({3: 10.0}))
    llm = LLM(target, **SETTINGS)
    assert llm.config.spec is not None and llm.config.draft_note == "the head that ships with stoop"


def test_a_head_that_did_not_pay_is_left_alone(target: str, capsys: pytest.CaptureFixture) -> None:
    from stoop.cli.start import start_llm

    store_of(target).add(DraftCosts({0: 10.0, 3: 70.0}))
    llm = start_llm(target, SETTINGS)
    assert llm.config.spec is None
    line = "off; the model's head does not make it faster here (0.63x at best)"
    assert f"speculative decoding: {line}" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("drafted_ms", [22.0, 70.0])
def test_what_a_busy_machine_shows_decides_nothing(target: str, drafted_ms: float) -> None:
    store_of(target).add(DraftCosts({0: 10.0, 3: drafted_ms}, busy=True))
    llm = LLM(target, **SETTINGS)
    assert llm.config.spec is not None and llm.config.spec.num_drafts == 3


def test_costs_are_refined(target: str) -> None:
    assert store_of(target).load() is None
    store_of(target).add(DraftCosts({0: 30.0, 3: 60.0}, busy=True))
    store_of(target).add(DraftCosts({0: 10.0, 3: 20.0}))  # undisturbed: replaces the former
    assert store_of(target).load() == DraftCosts({0: 10.0, 3: 20.0})
    store_of(target).add(DraftCosts({0: 99.0, 3: 99.0}, busy=True))  # disturbed: changes nothing
    store_of(target).add(DraftCosts({0: 20.0, 3: 40.0}))
    assert store_of(target).load() == DraftCosts({0: 15.0, 3: 30.0})
    assert store_of(target).load().times(3) == [15.0, 20.0, 25.0, 30.0]  # type: ignore[union-attr]
    store_of(target).add(
        DraftCosts({0: 30.0, 1: 40.0, 3: 60.0})
    )  # twice as slow, with one number more
    assert store_of(target).load() == DraftCosts({0: 22.5, 1: 30.0, 3: 45.0})


def test_a_run_counts_once_however_often_it_adds(target: str) -> None:
    store_of(target).add(DraftCosts({0: 10.0, 3: 20.0}))
    store = store_of(target)
    for ms in ({0: 20.0, 3: 40.0}, {0: 20.0, 1: 30.0, 3: 40.0}):
        store.add(DraftCosts(ms))
    assert store.load() == DraftCosts({0: 15.0, 1: 22.5, 3: 30.0})


def test_what_was_measured_long_ago_is_measured_again(target: str) -> None:
    """Or a head that was left out once would be left out forever."""
    last_year = time.time() - 365 * 24 * 3600
    store_of(target).add(DraftCosts({0: 10.0, 3: 70.0}, at=last_year))
    assert store_of(target).load() is None and LLM(target, **SETTINGS).config.spec is not None
    next_year = time.time() + 365 * 24 * 3600  # a clock that was wrong
    store_of(target).add(DraftCosts({0: 10.0, 3: 70.0}, at=next_year))
    assert store_of(target).load() is None
    store_of(target).add(DraftCosts({0: 10.0, 3: 12.0}))
    assert store_of(target).load() == DraftCosts({0: 10.0, 3: 12.0})


def test_engines_that_write_at_the_same_time_lose_nothing(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CostStore._read

    def read_slowly(store: CostStore) -> dict[str, object]:
        found = read(store)
        time.sleep(0.02)
        return found

    costs = [DraftCosts({0: 10.0, 3: 20.0}, load=1 << place) for place in range(4)]
    stores = [store_of(target) for _ in costs]
    monkeypatch.setattr(CostStore, "_read", read_slowly)
    with ThreadPoolExecutor(len(costs)) as pool:
        list(pool.map(CostStore.add, stores, costs))
    assert store_of(target).undisturbed() == costs


def test_a_store_that_stays_locked_keeps_nothing(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(target)
    store.add(DraftCosts({0: 10.0, 3: 20.0}))
    monkeypatch.setattr(draft_costs, "PATIENCE", 0.01)
    with FileLock(store.path.with_name(f".{draft_costs.STORE}.lock")):
        store.add(DraftCosts({0: 10.0, 3: 20.0}, load=2))
    assert [each.load for each in store.undisturbed()] == [1]


def test_costs_are_those_of_a_draft_vocabulary(target: str) -> None:
    """A head that drafts fewer tokens takes less time."""
    made, model = make_options(target, {"device": "cpu"}), read_model_spec(Path(target))
    head = shipped.SHIPPED[target]
    CostStore(made, model, head, 2, num_draft_tokens=64).add(DraftCosts({0: 1.0, 3: 2.0}))
    assert CostStore(made, model, head, 2).load() is None
    assert CostStore(made, model, head, 2, num_draft_tokens=32).load() is None
    assert CostStore(made, model, head, 2, num_draft_tokens=64).load() is not None


def test_costs_with_another_number_of_threads_are_a_guess(target: str) -> None:
    store_of(target, num_threads=97).add(DraftCosts({0: 10.0, 1: 11.0, 3: 12.0}))
    assert store_of(target, num_threads=97).load() == DraftCosts({0: 10.0, 1: 11.0, 3: 12.0})
    guess = store_of(target).load()
    assert guess == DraftCosts({0: 10.0, 1: 11.0, 3: 12.0}, tries=0) and not guess.sure
    disturbed = DraftCosts({0: 99.0, 3: 99.0}, busy=True)
    store_of(target).add(disturbed)
    assert store_of(target).load() == guess
    store_of(target).add(DraftCosts({0: 20.0, 3: 30.0}, tries=2))
    assert store_of(target).load() == DraftCosts({0: 20.0, 3: 30.0}, tries=2), "no mean of both"
    assert store_of(target, dtype="float64").load() is None, "another dtype takes other times"


def test_costs_with_another_number_of_threads_leave_no_head_out(target: str) -> None:
    store_of(target, num_threads=97).add(DraftCosts({0: 10.0, 3: 70.0}))
    llm = LLM(target, **SETTINGS)
    assert llm.config.spec is not None and costs_of(llm).sizes == [], "so they are measured"
    store_of(target).add(DraftCosts({0: 10.0, 3: 70.0}))
    assert LLM(target, **SETTINGS).config.spec is None


HUGE = "9" * 400  # an integer that no float can hold
RECORDS = [
    *('{"ms": ' + ms + ', "busy": false, "at": NOW, "tries": 5}' for ms in
      ("3", '{"0": "x"}', '{"0": 1.0, "3": 0}', '{"0": NaN}', '{"0": Infinity}', '{"-1": 1.0}',
       '{"none": 1.0}', "[[0, 1.0]]", '{"0": 1e-320, "3": 1e-300}', '{"0": HUGE, "3": 1.0}',
       '{"0": 1.0, "HUGE": 2.0}')),
    *('{"ms": {"0": 1.0, "3": 9.0}, "busy": false, ' + rest + "}" for rest in
      ('"at": Infinity', '"at": NaN', '"at": null', '"at": HUGE', '"at": NOW, "tries": Infinity',
       '"at": NOW, "tries": NaN', '"at": NOW, "tries": []', '"at": NOW, "num_threads": -Infinity',
       '"at": NOW, "num_threads": {}')),
    '{"num_drafts": 3, "plain_ms": 1.0, "drafted_ms": 2.0, "busy": false, "load": 1}',
    '{"busy": false}', "[1.0]", "9" * 5000, *("[" * deep + "]" * deep for deep in (950, 100_000)),
]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    ["", "[]", "\x00\ud800", *('{"KEY": ' + record + "}" for record in RECORDS)],
    ids=lambda content: ascii(content[:90]),
)
def test_a_broken_store_is_ignored_and_replaced(target: str, content: str) -> None:
    store = store_of(target)
    store.path.parent.mkdir()
    for name, value in {"KEY": store.key, "NOW": str(time.time()), "HUGE": HUGE}.items():
        content = content.replace(name, value)
    store.path.write_text(content, errors="surrogatepass")
    assert store.load() is None
    assert LLM(target, **SETTINGS).config.spec is not None
    store.add(DraftCosts({0: 10.0, 3: 12.0}))
    assert store.load() == DraftCosts({0: 10.0, 3: 12.0})


def test_a_store_that_cannot_be_written_is_done_without(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    llm = LLM(target, **SETTINGS)
    for load in (1, 2, 4):
        costs_of(llm)._keep(DraftCosts({0: 10.0, 3: 12.0}, load=load))
    assert caplog.text.count("cannot be written") == 1
    assert answers(llm)


def test_options_that_it_does_not_fit_win(target: str) -> None:
    llm = LLM(target, **SETTINGS, max_num_batched_tokens=2)
    assert llm.config.spec is None
    assert llm.config.draft_note.startswith("the model's head does not fit the other options")
    asked = {"model": str(shipped.SHIPPED[target]), "num_speculative_tokens": chooser.GPU_DRAFTS}
    with pytest.raises(ConfigError, match="max_num_batched_tokens=2"):
        LLM(target, **SETTINGS, max_num_batched_tokens=2, speculative_config=asked)
    # With a head's layer the cache is a third larger: refused where it is made.
    small = {**SETTINGS, "kv_cache_memory": str(128 * 3 * 2 * 64 * 4 + 50000), "max_num_seqs": 1}
    llm = LLM(target, **small)
    assert llm.config.spec is None and "KV cache" in llm.config.draft_note
    with pytest.raises(ConfigError, match="block_size=3"):  # wrong with and without drafts
        LLM(target, **SETTINGS, block_size=3)


def test_on_a_gpu_nothing_is_asked_of_the_store(target: str) -> None:
    store_of(target).add(DraftCosts({0: 10.0, 3: 70.0}))
    options, model = make_options(target, {}), read_model_spec(Path(target))
    found = choose_drafter(options, model, Path(target), "cuda:0", None)
    assert found.spec is not None and found.spec.num_drafts == chooser.GPU_DRAFTS
    assert found.note == "the head that ships with stoop"
    assert found.store is None


@pytest.mark.parametrize("options", [{"load_format": "dummy"}, {"speculative_config": "none"}])
def test_no_head_for_random_weights_or_for_none(target: str, options: dict[str, Any]) -> None:
    assert LLM(target, **SETTINGS, **options).config.spec is None


def test_a_model_without_a_head_has_no_drafts(target: str, tmp_path: Path) -> None:
    other = LLM(str(write_target(tmp_path / "other", num_layers=4)), **SETTINGS)
    assert other.config.spec is None and other.config.draft_note == ""
    (shipped.SHIPPED[target] / "config.json").unlink()  # as if it had not been shipped
    assert LLM(target, **SETTINGS).config.spec is None


def test_a_copy_of_the_weights_elsewhere_gets_the_head(target: str, tmp_path: Path) -> None:
    copy = shutil.copytree(target, tmp_path / "copy")
    options, model = make_options(str(copy), {}), read_model_spec(copy)
    found = choose_drafter(options, model, copy, "cuda:0", None)
    assert found.spec is not None and found.spec.folder == str(shipped.SHIPPED[target])


def test_options_without_a_model_are_those_of_the_shipped_head(target: str, tmp_path: Path) -> None:
    """The user chooses the number of drafts: nothing is measured, and no drafts are dropped."""
    for given in ({"method": "eagle3", "num_speculative_tokens": 2}, {"num_speculative_tokens": 2}):
        config = LLM(target, speculative_config=given, **SETTINGS).config
        assert config.spec is not None and config.draft_note == ""
        assert config.spec.folder == str(shipped.SHIPPED[target])
        assert (config.spec.method, config.spec.num_drafts) == ("eagle3", 2)
    for own in ({"method": "eagle3"}, {"method": "eagle3", "adaptive": False}):
        spec = LLM(target, speculative_config=own, **SETTINGS).config.spec
        assert spec is not None and spec.num_drafts == chooser.CPU_DRAFTS, "as auto has it"
    varied = {**given, "adaptive": True}
    policy = LLM(
        target, speculative_config=varied, graph_mode="full", **SETTINGS
    ).engine.core.drafts
    assert isinstance(policy, AdaptiveDrafts)
    assert policy.acceptance.usual == usual_rates(LENGTHS, 2), "what the head's benchmarks say"
    with pytest.raises(ConfigError, match="eagle"):
        LLM(target, speculative_config={"method": "eagle", "num_speculative_tokens": 2}, **SETTINGS)
    other = str(write_target(tmp_path / "other", num_layers=4))
    with pytest.raises(ConfigError, match="lacks model, and no head ships with this model: name"):
        LLM(other, speculative_config={"method": "eagle3", "num_speculative_tokens": 2}, **SETTINGS)


@pytest.mark.parametrize("packed", [False, True])
def test_auto_is_found_in_the_weights_that_the_engine_loads(
    target: str, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Otherwise a model would be converted twice, or downloaded at another revision."""
    asked: list[Any] = []

    def resolve(name: str, **options: Any) -> Path:
        asked.append((name, options))
        return Path(target)

    monkeypatch.setattr(chooser, "choose_packed", lambda *_: packed)
    monkeypatch.setattr(chooser, "resolve_model", resolve)
    assert expand_auto(make_options("org/model", {"revision": "v2"}), "cpu", None) is not None
    assert asked == [("org/model", {"revision": "v2", "report": None, "packed": packed})]


def test_auto_in_words(target: str, tmp_path: Path) -> None:
    head = str(shipped.SHIPPED[target])
    assert expand_auto(make_options(target, {}), "cuda:0", None) == {
        "model": head,
        "num_speculative_tokens": chooser.GPU_DRAFTS,
    }
    other = str(write_target(tmp_path / "other", num_layers=4))
    assert expand_auto(make_options(other, {"speculative_config": " Auto "}), "cpu", None) is None
    for given in (None, "none", {"method": "ngram"}):
        options = make_options(target, {"speculative_config": given})
        assert expand_auto(options, "cpu", None) == given


def test_named_heads_vary_their_drafts_if_asked_to(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = shutil.copytree(shipped.SHIPPED[target], Path(target).parent / "named")
    named = {"model": str(head), "num_speculative_tokens": 2}
    fixed = LLM(target, **SETTINGS, speculative_config=named)
    assert fixed.engine.core.drafts is None
    for asked in ({"adaptive": True}, {"num_speculative_tokens": "auto"}):
        llm = LLM(target, **SETTINGS, speculative_config={**named, **asked})
        assert policy_of(llm).counts == ((0, 1, 2) if "adaptive" in asked else (0, 1, 2, 3))
        costs_of(llm)._keep(DraftCosts({0: 10.0, 2: 12.0}))
        assert store_of(target).load() == DraftCosts({0: 10.0, 2: 12.0})  # the same head
    many = {**named, "num_speculative_tokens": 7, "adaptive": True}
    assert policy_of(LLM(target, **SETTINGS, speculative_config=many)).counts == (0, 1, 3, 7)
    monkeypatch.chdir(head)  # costs are not kept under the name of whatever lies there
    before = draft_costs.cache_dir().joinpath(draft_costs.STORE).read_text()
    lookup = {"method": "ngram", "num_speculative_tokens": 2, "adaptive": True}
    llm = LLM(target, **SETTINGS, speculative_config=lookup)
    assert not policy_of(llm).has_kv
    costs_of(llm)._keep(DraftCosts({0: 1.0, 2: 2.0}))
    assert draft_costs.cache_dir().joinpath(draft_costs.STORE).read_text() == before


# ---- while it runs ----


def take(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
    """Steps seem to take as long as told, by requests and drafts, whatever this machine says."""

    def made_up(self: EngineCore, started: float, waited: float) -> StepTime:
        plan = self._at_hand
        assert plan is not None
        drafts = max(row.num_tokens for row in plan.rows) - 1
        taken = seconds(len(plan.rows), drafts)
        return StepTime(taken, 0.0, taken)

    monkeypatch.setattr(EngineCore, "_time_step", made_up)


def test_costs_are_kept_for_the_next_start(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, lambda reqs, drafts: 0.010 + 0.001 * drafts)
    llm = LLM(target, **ROOMY)
    for _ in range(2):
        llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=240), use_tqdm=False)
    known = store_of(target).load()
    assert known is not None and known.ms == pytest.approx({0: 10, 1: 11, 2: 12, 3: 13})
    again = LLM(target, **ROOMY)
    assert costs_of(again).sizes == [1]
    assert again.metrics()["spec_decode_policy"] == "3 drafts at 1 request, as far as measured"


def test_an_engine_drafts_for_few_requests_only(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once go without drafts, one at a time has them."""
    take(monkeypatch, lambda reqs, drafts: 0.01 + (0.001 if reqs == 1 else 0.1) * drafts)
    long = GREEDY.replace(max_tokens=220)
    expected = answers(LLM(target, **ROOMY, speculative_config=None), long)
    llm = LLM(target, **ROOMY, block_size=4)
    assert answers(llm, long) == expected
    by_drafts = llm.metrics()["num_steps_by_drafts"]
    assert by_drafts[0] > 20, by_drafts
    before = llm.metrics()["spec_decode_num_drafts"]
    (alone,) = llm.generate(PROMPTS[0], long, use_tqdm=False)
    assert alone.outputs[0].token_ids == expected[0]
    assert llm.metrics()["spec_decode_num_drafts"] > before + 20
    assert llm.metrics()["spec_decode_policy"] == (
        "3 drafts at 1 request, none at 2, as far as measured"
    )


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft seems to take as long as a hundred steps without."""
    take(monkeypatch, lambda reqs, drafts: 0.001 + 0.1 * drafts)


def test_answers_are_the_same_whether_drafts_stay_or_go(target: str, costly: None) -> None:
    long = GREEDY.replace(max_tokens=200)
    expected = answers(LLM(target, **ROOMY, speculative_config=None), long)
    llm = LLM(target, **ROOMY, block_size=4)
    assert llm.metrics()["drafting"]
    (alone,) = llm.generate(PROMPTS[0], long, use_tqdm=False)
    assert alone.outputs[0].token_ids == expected[0]
    assert policy_of(llm).hopeless and not llm.metrics()["drafting"]
    before = llm.metrics()["spec_decode_num_drafts"]
    assert before > 0 and answers(llm, long) == expected
    llm.generate(PROMPTS[0], long, use_tqdm=False)
    steps = llm.metrics()["num_steps_by_drafts"]
    llm.generate(PROMPTS[0], long, use_tqdm=False)
    after = llm.metrics()["num_steps_by_drafts"]
    assert {k: n for k, n in after.items() if k} == {k: n for k, n in steps.items() if k}
    assert after[0] > steps[0] + 100, "nothing is drafted any more, for prompts neither"
    for num_runs in (2, 3):
        again = LLM(target, **ROOMY, block_size=4)
        assert again.config.spec is not None and not policy_of(again).hopeless, num_runs
        again.generate(PROMPTS[0], long, use_tqdm=False)
    assert LLM(target, **SETTINGS).config.spec is None, "once it is sure, the head is left out"


def test_blocks_without_the_drafters_kv_are_not_offered(target: str, costly: None) -> None:
    """Off for one request, on for the next, whose prompt goes on from the first one's answer: its
    drafts are those of an engine that never paused."""
    long = GREEDY.replace(max_tokens=200)
    llm = LLM(target, **ROOMY, block_size=4)
    (first,) = llm.generate(PROMPTS[0], long, use_tqdm=False)
    assert policy_of(llm).num_drafts == 0
    llm.engine.core.drafts = None  # from here on drafts as ever
    llm.engine.scheduler.num_places = llm.engine.scheduler.num_drafts = 3
    llm.engine.scheduler.keeps_drafter_kv = True
    follow_up = [*PROMPTS[0], *first.outputs[0].token_ids][:210]
    (found,) = llm.generate(follow_up, GREEDY, use_tqdm=False)
    asked = {"model": str(shipped.SHIPPED[target]), "num_speculative_tokens": 3}
    fresh = LLM(target, **ROOMY, block_size=4, speculative_config=asked)
    (expected,) = fresh.generate(follow_up, GREEDY, use_tqdm=False)
    assert found.num_cached_tokens and found.num_cached_tokens < 200
    assert found.outputs[0].spec == expected.outputs[0].spec is not None


def test_without_drafts_the_prefix_cache_is_that_of_a_plain_engine(
    target: str, costly: None
) -> None:
    """The next turn finds the whole answer, and a repeated prompt itself; neither gets drafts."""
    long = GREEDY.replace(max_tokens=150)
    found = {}
    for name, asked in (("plain", None), ("adaptive", "auto")):
        llm = LLM(target, **ROOMY, block_size=4, speculative_config=asked)
        for prompt in PROMPTS:
            (first,) = llm.generate(prompt, long, use_tqdm=False)
        follow_up = [*PROMPTS[-1], *first.outputs[0].token_ids, 9]
        made = llm.metrics()["spec_decode_num_drafts"]
        again = [llm.generate(each, GREEDY, use_tqdm=False)[0] for each in (follow_up, follow_up)]
        assert llm.metrics()["spec_decode_num_drafts"] == made
        found[name] = [(each.num_cached_tokens, each.outputs[0].token_ids) for each in again]
    assert found["adaptive"] == found["plain"]
    assert found["plain"][0][0] >= 160


def test_where_steps_cannot_be_timed_every_step_makes_all_drafts(target: str) -> None:
    assert LLM(target, **SETTINGS, graph_mode="step").engine.core.drafts is None
    assert LLM(target, **SETTINGS, run_ahead=1).engine.core.drafts is None
    asked = {"model": str(shipped.SHIPPED[target]), "num_speculative_tokens": 2}
    assert LLM(target, **SETTINGS, speculative_config=asked).engine.core.drafts is None
    varied = {**asked, "adaptive": True}
    policy = policy_of(LLM(target, **SETTINGS, speculative_config=varied, graph_mode="step"))
    assert isinstance(policy.costs, GraphCosts)
