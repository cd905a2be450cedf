"""`speculative_config="auto"`: the head that comes with a model, where it pays."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM, SamplingParams
from stoop.checkpoint import shipped
from stoop.checkpoint.toy import write_head, write_target
from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options
from stoop.engine import choose_drafter as chooser
from stoop.engine import draft_costs, draft_trial
from stoop.engine.choose_drafter import choose_drafter, choose_drafts, expand_auto
from stoop.engine.draft_costs import CostStore, DraftCosts
from stoop.engine.draft_estimates import usual_rates
from stoop.engine.draft_policy import AdaptiveDrafts
from stoop.engine.draft_trial import DraftTrial
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
    return CostStore(made, read_model_spec(Path(target)), shipped.SHIPPED[target])


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
    assert llm.config.draft_note == (
        "the head that ships with stoop; stoop measures while it runs whether this helps here"
    )


def test_a_head_that_paid_is_used_with_the_best_number_of_drafts(target: str) -> None:
    store_of(target).add(DraftCosts(3, 10.0, 22.0))
    llm = LLM(target, **SETTINGS)
    assert llm.config.spec is not None and llm.config.spec.num_drafts == 2
    assert llm.config.draft_note == (
        "the head that ships with stoop: a step took 18 ms here instead of 10, and yields 2.7 "
        "tokens on benchmarks"
    )
    plain = LLM(target, **SETTINGS, speculative_config=None)
    assert plain.config.spec is None and plain.config.draft_note == ""
    assert answers(llm) == answers(plain)
    assert llm.metrics()["spec_decode_num_accepted_tokens"] > 0


def test_fewer_drafts_in_one_run_do_not_mean_fewer_ever_after(target: str) -> None:
    store_of(target).add(DraftCosts(1, 10.0, 11.0))
    llm = LLM(target, **SETTINGS)
    assert llm.config.spec is not None and llm.config.spec.num_drafts == 3


def test_what_is_known_is_measured_less_often(target: str) -> None:
    def first_plain(num_reqs: int) -> int:
        trial = LLM(target, **SETTINGS).engine.core.trial
        assert trial is not None
        for step in itertools.count(1 - draft_trial.WARM_STEPS):
            if trial.wants_plain(num_reqs):
                return step - 1
            trial.note_drafted(0.01, num_reqs, num_reqs)
        raise AssertionError

    assert first_plain(1) == draft_trial.EARLY_GAP and first_plain(2) == draft_trial.SEVERAL_GAP
    store_of(target).add(DraftCosts(3, 10.0, 12.0))
    assert first_plain(1) == draft_trial.KNOWN_GAP and first_plain(2) == draft_trial.SEVERAL_GAP
    store_of(target).add(DraftCosts(3, 10.0, 12.0, load=2))
    assert first_plain(2) == draft_trial.KNOWN_GAP


def test_a_head_that_did_not_pay_is_left_alone(target: str, capsys: pytest.CaptureFixture) -> None:
    from stoop.cli.start import start_llm

    store_of(target).add(DraftCosts(3, 10.0, 70.0))
    llm = start_llm(target, SETTINGS)
    assert llm.config.spec is None
    line = "off; the model's head does not make it faster here (0.63x at best)"
    assert f"speculative decoding: {line}" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("drafted_ms", [22.0, 70.0])
def test_what_a_busy_machine_shows_decides_nothing(target: str, drafted_ms: float) -> None:
    store_of(target).add(DraftCosts(3, 10.0, drafted_ms, busy=True))
    llm = LLM(target, **SETTINGS)
    assert llm.config.spec is not None and llm.config.spec.num_drafts == 3


def test_costs_are_refined(target: str) -> None:
    store = store_of(target)
    assert store.load() is None
    store.add(DraftCosts(3, 30.0, 60.0, busy=True))
    store.add(DraftCosts(3, 10.0, 20.0))  # undisturbed: replaces the former
    assert store.load() == DraftCosts(3, 10.0, 20.0)
    store.add(DraftCosts(3, 99.0, 99.0, busy=True))  # disturbed: changes nothing
    store.add(DraftCosts(3, 20.0, 40.0))
    assert store.load() == DraftCosts(3, 15.0, 30.0)
    assert store.load().times(3) == [15.0, 20.0, 25.0, 30.0]  # type: ignore[union-attr]


def test_the_number_of_threads_loses_nothing(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store_of(target).add(DraftCosts(3, 10.0, 12.0))
    monkeypatch.setattr("torch.get_num_threads", lambda: 97)
    assert store_of(target).load() == DraftCosts(3, 10.0, 12.0)
    assert store_of(target, dtype="float64").load() is None, "another dtype takes other times"


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"%s": [1.0]}', '{"%s": {"num_drafts": 3}}', '{"%s": {"num_drafts": 3, '
     '"plain_ms": "x", "drafted_ms": 0, "busy": false}}'],
)  # fmt: skip
def test_a_broken_store_is_ignored_and_replaced(target: str, tmp_path: Path, content: str) -> None:
    store = store_of(target)
    store.path.parent.mkdir()
    store.path.write_text(content.replace("%s", store.key))
    assert store.load() is None
    assert LLM(target, **SETTINGS).config.spec is not None
    store.add(DraftCosts(3, 10.0, 12.0))
    assert store.load() == DraftCosts(3, 10.0, 12.0)


def test_a_store_that_cannot_be_written_is_done_without(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    llm = LLM(target, **SETTINGS)
    assert llm.engine.core.trial is not None
    llm.engine.core.trial._keep(DraftCosts(3, 10.0, 12.0))
    assert "cannot be written" in caplog.text
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
    store_of(target).add(DraftCosts(3, 10.0, 70.0))
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


def test_auto_in_words(target: str, tmp_path: Path) -> None:
    head = str(shipped.SHIPPED[target])
    assert expand_auto("auto", target, "cuda:0") == {
        "model": head,
        "num_speculative_tokens": chooser.GPU_DRAFTS,
    }
    other = str(write_target(tmp_path / "other", num_layers=4))
    assert expand_auto(" Auto ", other, "cpu") is None
    for given in (None, "none", {"method": "ngram"}):
        assert expand_auto(given, target, "cpu") == given


# ---- while it runs ----


def feed(
    trial: DraftTrial, plain: float, drafted: float, tokens: int, steps: int = 80, reqs: int = 1
) -> int:
    """Steps as an engine would make them; returns how many verified no drafts.

    tokens: that a step yields for each request
    """
    num_plain = 0
    for _ in range(steps):
        if trial.wants_plain(reqs):
            num_plain += 1
            trial.note_plain(plain, num_reqs=reqs)
        else:
            trial.note_drafted(drafted, reqs * tokens, reqs)
    return num_plain


def test_costs_are_kept_once_known() -> None:
    kept: list[DraftCosts] = []
    trial = DraftTrial(3, LENGTHS, kept.append)
    num_plain = feed(trial, plain=0.010, drafted=0.020, tokens=3)
    assert trial.pays() and kept == [DraftCosts(3, pytest.approx(10.0), pytest.approx(20.0))]
    assert num_plain == draft_trial.PLAIN_SAMPLES
    assert feed(trial, 0.010, 0.020, 3, steps=300) <= 5, "few plain steps once costs are known"


def test_costs_measured_beside_other_programs_say_so() -> None:
    kept: list[DraftCosts] = []
    trial = DraftTrial(3, LENGTHS, kept.append)
    feed(trial, plain=0.010, drafted=0.020, tokens=3, steps=9)
    trial.note_plain(0.010, busy=True)
    feed(trial, plain=0.010, drafted=0.020, tokens=3)
    assert [costs.busy for costs in kept] == [True]


def test_drafts_that_cannot_pay_are_off_for_good(caplog: pytest.LogCaptureFixture) -> None:
    trial = DraftTrial(3, LENGTHS, lambda costs: None)
    feed(trial, plain=0.010, drafted=0.050, tokens=3)
    assert not trial.pays() and trial.wants_plain()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "speculative decoding is off from now on: a step takes 50.0 ms with K = 3 and 10.0 ms "
    )
    trial.note_idle()
    assert not trial.pays()


def test_drafts_that_are_rejected_are_off_for_these_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trial = DraftTrial(3, LENGTHS, lambda costs: None)
    feed(trial, plain=0.010, drafted=0.020, tokens=1)
    assert not trial.pays()
    assert "until these requests are done" in caplog.text
    trial.note_idle()
    assert trial.pays() and not trial.wants_plain()


def test_drafts_that_pay_for_one_request_may_not_pay_for_several(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Decided by load, and for all larger ones; those below go on."""
    kept: list[DraftCosts] = []
    trial = DraftTrial(3, LENGTHS, kept.append)
    feed(trial, plain=0.004, drafted=0.008, tokens=3)
    feed(trial, plain=0.005, drafted=0.011, tokens=3, reqs=2)
    assert trial.pays(1) and trial.pays(2) and trial.pays(16), "nothing is known of 16"
    feed(trial, plain=0.006, drafted=0.022, tokens=3, reqs=3)
    assert [trial.pays(count) for count in (1, 2, 3, 4, 16)] == [True, True, False, False, False]
    assert trial.wants_plain(3) and not trial.hopeless
    assert caplog.text.count("is off while 3 or more requests run") == 1
    assert [(each.load, round(each.plain_ms, 1)) for each in kept] == [(1, 4.0), (2, 5.0), (4, 6.0)]
    trial.note_idle()  # usual acceptance would not make up for it
    assert [trial.pays(count) for count in (2, 3)] == [True, False]


def test_known_costs_decide_before_new_ones_are_measured() -> None:
    known = [DraftCosts(3, 10.0, 20.0, load=4), DraftCosts(2, 1.0, 20.0, load=8)]
    trial = DraftTrial(3, LENGTHS, lambda costs: None, known)
    feed(trial, plain=0.010, drafted=0.020, tokens=1, reqs=4, steps=20)
    assert not trial.pays(4), "20 steps of 4 requests tell what is accepted"
    trial.note_idle()
    feed(trial, plain=0.010, drafted=0.020, tokens=3, reqs=4, steps=20)
    assert trial.pays(4)
    feed(trial, plain=0.010, drafted=0.020, tokens=1, reqs=8, steps=12)
    assert trial.pays(8), "of another number of drafts"


def test_rejected_drafts_of_several_requests_are_tried_again_later() -> None:
    trial = DraftTrial(3, LENGTHS, lambda costs: None)
    feed(trial, plain=0.010, drafted=0.020, tokens=1, reqs=4)
    assert trial.pays(2) and not trial.pays(4)
    trial.note_idle()
    assert trial.pays(4)


def test_what_earlier_runs_found_with_several_requests_is_used(target: str) -> None:
    store = store_of(target)
    store.add(DraftCosts(3, 10.0, 18.0))
    store.add(DraftCosts(3, 12.0, 60.0, load=8))
    store.add(DraftCosts(3, 11.0, 60.0, busy=True, load=4))
    assert store.load() == DraftCosts(3, 10.0, 18.0)
    trial = LLM(target, **SETTINGS).engine.core.trial
    assert trial is not None
    assert [trial.pays(count) for count in (1, 4, 5, 8, 100)] == [True, True, False, False, False]
    store.add(DraftCosts(2, 1.0, 60.0, load=2))  # of another number of drafts
    trial = LLM(target, **SETTINGS).engine.core.trial
    assert trial is not None and trial.pays(2)


def test_an_engine_drafts_for_few_requests_only(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once go without drafts, one at a time has them."""
    plain, drafted = DraftTrial.note_plain, DraftTrial.note_drafted
    monkeypatch.setattr(
        DraftTrial, "note_plain", lambda self, _, busy, count: plain(self, 0.010, busy, count)
    )
    monkeypatch.setattr(
        DraftTrial,
        "note_drafted",
        lambda self, _, n, count: drafted(self, 0.011 if count == 1 else 0.3, n, count),
    )
    long = GREEDY.replace(max_tokens=220)
    expected = answers(LLM(target, **ROOMY, speculative_config=None), long)
    llm = LLM(target, **ROOMY, block_size=4)
    trial = llm.engine.core.trial
    assert trial is not None and answers(llm, long) == expected
    assert trial.pays(1) and not trial.pays(len(PROMPTS))
    by_drafts = llm.metrics()["num_steps_by_drafts"]
    assert by_drafts[0] > 20, by_drafts
    before = llm.metrics()["spec_decode_num_drafts"]
    (alone,) = llm.generate(PROMPTS[0], long, use_tqdm=False)
    assert alone.outputs[0].token_ids == expected[0]
    assert llm.metrics()["spec_decode_num_drafts"] > before + 20


def test_one_slow_step_decides_nothing() -> None:
    trial = DraftTrial(3, LENGTHS, lambda costs: None)
    feed(trial, plain=0.010, drafted=0.020, tokens=3)
    trial.note_drafted(5.0, 1)
    trial.note_drafted(5.0, 1)
    assert trial.pays()


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step with drafts seems to take a hundred times as long as one without."""
    plain, drafted = DraftTrial.note_plain, DraftTrial.note_drafted
    monkeypatch.setattr(
        DraftTrial, "note_plain", lambda self, _, busy, count: plain(self, 0.001, busy, count)
    )
    monkeypatch.setattr(
        DraftTrial, "note_drafted", lambda self, _, n, count: drafted(self, 0.1, n, count)
    )


def test_answers_are_the_same_whether_drafts_stay_or_go(target: str, costly: None) -> None:
    long = GREEDY.replace(max_tokens=200)
    expected = answers(LLM(target, **ROOMY, speculative_config=None), long)
    llm = LLM(target, **ROOMY, block_size=4)
    assert llm.engine.core.trial is not None and llm.metrics()["drafting"]
    (alone,) = llm.generate(PROMPTS[0], long, use_tqdm=False)
    assert not llm.engine.core.trial.pays()
    assert not llm.metrics()["drafting"]
    assert alone.outputs[0].token_ids == expected[0]
    before = llm.metrics()["spec_decode_num_drafts"]
    assert before > 0 and answers(llm, long) == expected
    assert llm.metrics()["spec_decode_num_drafts"] == before, "nothing is drafted any more"
    (costs,) = json.loads((draft_costs.cache_dir() / draft_costs.STORE).read_text()).values()
    assert costs["num_drafts"] == 3 and costs["drafted_ms"] == 100.0


def test_blocks_without_the_drafters_kv_are_not_offered(target: str, costly: None) -> None:
    """Off for one request, on for the next, whose prompt goes on from the first one's answer: its
    drafts are those of an engine that never paused."""
    long = GREEDY.replace(max_tokens=200)
    llm = LLM(target, **ROOMY, block_size=4)
    (first,) = llm.generate(PROMPTS[0], long, use_tqdm=False)
    assert llm.engine.core.trial is not None and not llm.engine.core.trial.pays()
    llm.engine.core.trial = None  # from here on drafts as ever
    llm.engine.scheduler.num_places = llm.engine.scheduler.num_drafts = 3
    follow_up = [*PROMPTS[0], *first.outputs[0].token_ids][:210]
    (found,) = llm.generate(follow_up, GREEDY, use_tqdm=False)
    asked = {"model": str(shipped.SHIPPED[target]), "num_speculative_tokens": 3}
    fresh = LLM(target, **ROOMY, block_size=4, speculative_config=asked)
    (expected,) = fresh.generate(follow_up, GREEDY, use_tqdm=False)
    assert found.num_cached_tokens and found.num_cached_tokens < 200
    assert found.outputs[0].spec == expected.outputs[0].spec is not None


def test_graphs_and_steps_ahead_have_no_trial(target: str) -> None:
    assert LLM(target, **SETTINGS, graph_mode="step").engine.core.trial is None
    assert LLM(target, **SETTINGS, run_ahead=1).engine.core.trial is None
    asked = {"model": str(shipped.SHIPPED[target]), "num_speculative_tokens": 2}
    assert LLM(target, **SETTINGS, speculative_config=asked).engine.core.trial is None
