"""`speculative_config="auto"`: the head that comes with a model, where it pays."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoop import LLM, SamplingParams
from stoop.checkpoint import shipped
from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options
from stoop.engine import drafter, probe
from stoop.engine.drafter import choose_drafts, find_drafter, spelled_out
from stoop.models.hf_config import read_model_spec
from stoop.models.toy import write_head, write_target

SETTINGS = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 9, 3], [5] * 20]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that a head comes with."""
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "_is_busy", lambda: False)
    target = str(write_target(tmp_path / "target"))
    head = write_head(tmp_path / "head", "eagle3", max_position=256)
    (head / shipped.LENGTHS).write_text(json.dumps({"tokens_per_step": [1.9, 2.7, 3.4]}))
    shipped.write_fingerprint(Path(target), head)
    monkeypatch.setitem(shipped.SHIPPED, target, head)
    return target


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let engines with 0, 1 ... drafts seem to take so long; returns the drafts of those timed."""

    def pretend(*times: float) -> list[int]:
        seen: list[int] = []

        def time_steps(engine: Any, vocab_size: int) -> float:
            spec = engine.config.spec
            seen.append(spec.num_tokens if spec else 0)
            return times[seen[-1]]

        monkeypatch.setattr(probe, "time_steps", time_steps)
        return seen

    return pretend


def answers(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


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


def test_a_head_that_pays_is_used(target: str, timed: Callable[..., list[int]]) -> None:
    seen = timed(10, 11, 12, 16)
    llm = LLM(target, **SETTINGS)
    assert seen == [0, 1, 2, 3]
    assert llm.config.spec is not None and llm.config.spec.num_tokens == 2
    assert llm.config.draft_note == (
        "the head that comes with the model: a step takes 12 ms here instead of 10 and yields 2.7 "
        "tokens, greedy, on benchmarks; it pays from 1.2 on"
    )
    plain = LLM(target, **SETTINGS, speculative_config=None)
    assert plain.config.spec is None and plain.config.draft_note == ""
    assert answers(llm) == answers(plain)
    assert llm.metrics()["spec_decode_num_accepted_tokens"] > 0
    assert seen == [0, 1, 2, 3], "measured once, and not for those who want none"


def test_a_head_that_does_not_pay_is_left_alone(
    target: str, timed: Callable[..., list[int]], capsys: pytest.CaptureFixture
) -> None:
    from stoop.cli.start import start_llm

    timed(10, 30, 50, 70)
    llm = start_llm(target, SETTINGS)
    assert llm.config.spec is None
    line = "drafts: none; its head makes it no faster here (0.63x at best)"
    assert line in capsys.readouterr().err.splitlines()


def test_steps_are_measured_for_real(target: str, tmp_path: Path) -> None:
    stages = []
    llm = LLM(target, report=lambda stage, done, total: stages.append(stage), **SETTINGS)
    (times,) = json.loads((tmp_path / "cache" / probe.STORE).read_text()).values()
    assert len(times) == 1 + probe.MAX_DRAFTS and min(times) > 0
    assert llm.config.draft_note
    assert stages.count("measuring whether drafts pay here") == len(times)


def test_what_a_busy_machine_shows_is_not_kept(
    target: str, timed: Callable[..., list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("STOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(shipped.SHIPPED, target, tmp_path / "head")
    seen: list[int] = []
    monkeypatch.setattr(probe, "time_steps", lambda *_: (20.0, 10.0, 30.0, 40.0)[len(seen) % 4])
    monkeypatch.setattr(probe, "_probe", lambda *given: seen.append(given[-1]) or given[0])
    monkeypatch.setattr(probe.os, "cpu_count", lambda: 4)
    options, model = make_options(target, {"device": "cpu"}), read_model_spec(Path(target))
    for load, measured in ((3.5, 4), (3.5, 8), (2.5, 12), (3.5, 12)):
        monkeypatch.setattr(probe.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        times = probe.step_times(options, model, tmp_path / "head", lambda _: None, None)
        assert len(seen) == measured
        assert times == [10.0, 30.0, 40.0, 40.0]


@pytest.mark.parametrize("content", ["", '{"a": ["b"]}', '{"%s": [1.0]}'])
def test_a_broken_store_is_made_anew(
    target: str, timed: Callable[..., list[int]], tmp_path: Path, content: str
) -> None:
    store = tmp_path / "cache" / probe.STORE
    store.parent.mkdir()
    options = make_options(target, {"device": "cpu"})
    model = read_model_spec(Path(target))
    key = probe._machine(options, model, shipped.SHIPPED[target])
    store.write_text(content.replace("%s", key))
    seen = timed(10, 11, 12, 13)
    assert LLM(target, **SETTINGS).config.spec is not None and len(seen) == 4
    assert LLM(target, **SETTINGS).config.spec is not None and len(seen) == 4
    assert LLM(target, **SETTINGS, dtype="float64").config.spec is not None
    assert len(seen) == 8, "another dtype takes other times"


def test_a_store_that_cannot_be_written_is_done_without(
    target: str, timed: Callable[..., list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    timed(10, 11, 12, 13)
    assert LLM(target, **SETTINGS).config.spec is not None
    assert "cannot be written" in caplog.text


def test_options_that_it_does_not_fit_win(target: str, timed: Callable[..., list[int]]) -> None:
    timed(10, 11, 12, 13)
    llm = LLM(target, **SETTINGS, max_num_batched_tokens=2)
    assert llm.config.spec is None
    assert llm.config.draft_note.startswith("its head does not fit the other options")
    asked = {"model": str(shipped.SHIPPED[target]), "num_speculative_tokens": drafter.GPU_DRAFTS}
    with pytest.raises(ConfigError, match="max_num_batched_tokens=2"):
        LLM(target, **SETTINGS, max_num_batched_tokens=2, speculative_config=asked)
    # With a head's layer the cache is a third larger: refused where it is made.
    small = {**SETTINGS, "kv_cache_memory": str(128 * 3 * 2 * 64 * 4 + 50000), "max_num_seqs": 1}
    llm = LLM(target, **small)
    assert llm.config.spec is None and "KV cache" in llm.config.draft_note
    with pytest.raises(ConfigError, match="block_size=3"):  # wrong with and without drafts
        LLM(target, **SETTINGS, block_size=3)


def test_on_a_gpu_nothing_is_measured(target: str) -> None:
    options, model = make_options(target, {}), read_model_spec(Path(target))

    def build(options: Any) -> Any:
        raise AssertionError("an engine was made to measure it")

    found = find_drafter(options, model, "cuda:0", build, None)
    assert found.spec is not None and found.spec.num_tokens == drafter.GPU_DRAFTS
    assert found.note == "the head that comes with the model"


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
    found = find_drafter(options, model, "cuda:0", lambda _: None, None)
    assert found.spec is not None and found.spec.folder == str(shipped.SHIPPED[target])


def test_auto_in_words(target: str, tmp_path: Path) -> None:
    head = str(shipped.SHIPPED[target])
    assert spelled_out("auto", target, "cuda:0") == {
        "model": head,
        "num_speculative_tokens": drafter.GPU_DRAFTS,
    }
    other = str(write_target(tmp_path / "other", num_layers=4))
    assert spelled_out(" Auto ", other, "cpu") is None
    for given in (None, "none", {"method": "ngram"}):
        assert spelled_out(given, target, "cpu") == given
