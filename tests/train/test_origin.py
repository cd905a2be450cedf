"""Options over data that is there: what continues, what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from stoop.cli.main import app
from stoop.config.errors import ConfigError
from stoop.train import workers
from stoop.train.job import Job
from stoop.train.origin import OPTIONS, PROMPTS, digest_target, read_origin
from stoop.train.settings import DataSettings, Settings
from stoop.train.shards import INVENTED, ShardStore, load_corpus, read_counts
from stoop.train.stages import run_train
from stoop.train.workers import run_data
from support.training import documents, write_text_model

DATA: dict[str, Any] = {"max_answer": 12, "max_len": 400, "max_num_seqs": 4, "invent": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("origin") / "model")


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(f"number {i}\n" for i in range(count)))
    return path


def make_job(target: Path, out: Path, changes: dict[str, Any], **more: Any) -> Job:
    lines: list[str] = []
    own = {name: changes[name] for name in ("seed", "dtype", "device") if name in changes}
    data = DATA | {name: value for name, value in changes.items() if name not in own}
    settings = Settings(data=DataSettings(**data), **{"device": "cpu", **own})
    return Job(str(target), out, settings, lines.append, **more)


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data; nothing in it is to be changed."""
    out = tmp_path_factory.mktemp("made")
    run_data(make_job(target, out, {}), [write_prompts(out / "prompts.txt", 6)])
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "out")
    return tmp_path / "out"


def files(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }


def refuse_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_engine(*args: Any, **options: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(workers, "LLM", no_engine)


# ---- data that is there ----


@pytest.mark.parametrize(
    ("change", "was", "now"),
    [
        ({"max_answer": 24}, "--max-answer 12", "--max-answer 24"),
        ({"max_len": 200}, "--max-len 400", "--max-len 200"),
        ({"temperature": 1.0}, "--temperature 0.7", "--temperature 1.0"),
        ({"greedy_share": 0.25}, "--greedy-share 0.5", "--greedy-share 0.25"),
        ({"answers": 2}, "--answers 1", "--answers 2"),  # a first answer would more often be greedy
        ({"invent": 1}, "--invent 2", "--invent 1"),
        ({"seed": 1}, "--seed 0", "--seed 1"),
        ({"dtype": "float32"}, "--dtype float64", "--dtype float32"),
    ],
)
def test_options_for_other_data_are_refused(
    target: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    was: str,
    now: str,
) -> None:
    refuse_engines(monkeypatch)
    before = files(out)
    for count in (1, 2):
        with pytest.raises(ConfigError) as error:
            run_data(make_job(target, out, {**change, "workers": count}), [out / "prompts.txt"])
        sentence = str(error.value)
        assert f"was made with {was}, and {now} would make other data: give {was}" in sentence
        assert "another --out" in sentence and "--fresh-data" in sentence
    assert files(out) == before


def test_options_that_only_add_data_continue(target: Path, out: Path) -> None:
    first, invented = documents(out / "data"), (out / "data" / INVENTED).read_text()
    changes = {"invent": 3, "max_num_seqs": 7, "kv_cache_memory": "1MiB", "device": "auto"}
    more = write_prompts(out / "more.txt", 9)
    run_data(make_job(target, out, changes), [more])
    assert set(first) < set(documents(out / "data"))
    texts = (out / "data" / INVENTED).read_text()
    assert texts.startswith(invented) and len(texts.splitlines()) == 3
    origin = read_origin(out / "data")
    assert origin is not None and origin.options["invent"] == 3 and len(origin.prompts) == 9
    with pytest.raises(ConfigError, match="--invent 3, and --invent 2"):
        run_data(make_job(target, out, {}), [more])


def test_more_answers_to_each_prompt_are_those_of_a_new_run(target: Path, tmp_path: Path) -> None:
    """Where the first ones stay as they are: all drawn, or all greedy already."""
    prompts = [write_prompts(tmp_path / "prompts.txt", 5)]
    for share, first, second in ((0.0, 1, 2), (0.5, 2, 3)):
        grown, new = tmp_path / f"grown-{share}", tmp_path / f"new-{share}"
        options = {"greedy_share": share, "invent": 0}
        run_data(make_job(target, grown, {**options, "answers": first}), prompts)
        assert read_counts(grown / "data")["answers"] == 5 * first
        run_data(make_job(target, grown, {**options, "answers": second}), prompts)
        run_data(make_job(target, new, {**options, "answers": second}), prompts)
        assert documents(grown / "data") == documents(new / "data")
        with pytest.raises(ConfigError, match=f"--answers {second}, and --answers {first}"):
            run_data(make_job(target, grown, {**options, "answers": first}), prompts)


def test_prompts_that_are_no_longer_given_are_refused(
    target: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_engines(monkeypatch)
    fewer, job = write_prompts(tmp_path / "fewer.txt", 4), make_job(target, out, {})
    with pytest.raises(ConfigError, match=r"prompts\.txt, of which 2 are not in .*fewer\.txt: "):
        run_data(job, [fewer])
    with pytest.raises(ConfigError, match="of which 6 are not in this command"):
        run_data(job, [])
    edited = out / "prompts.txt"
    edited.write_text(edited.read_text().replace("number 3", "number three"))
    with pytest.raises(ConfigError, match="of which 1 are not in"):
        run_data(job, [edited])


def test_prompts_are_known_by_what_they_say(target: Path, out: Path, tmp_path: Path) -> None:
    """Not by the names, number and order of their files."""
    before = documents(out / "data")
    lines = (out / "prompts.txt").read_text().splitlines()
    parts = [tmp_path / "b.txt", tmp_path / "a.jsonl"]
    parts[0].write_text("\n".join(lines[3:]))
    parts[1].write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines[:3]))
    run_data(make_job(target, out, {}), parts)
    assert documents(out / "data") == before


def test_a_target_is_known_by_its_files(target: Path, out: Path, tmp_path: Path) -> None:
    moved, prompts = tmp_path / "moved", [out / "prompts.txt"]
    shutil.copytree(target, moved)
    run_data(make_job(moved, out, {}), prompts)  # the same one elsewhere
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{moved} has changed since .*data was made"):
        run_data(make_job(moved, out, {}), prompts)
    with pytest.raises(ConfigError, match="has changed since"):
        run_train(make_job(moved, out, {}))
    other = make_job(target, out, {})
    run_data(other, prompts)
    with pytest.raises(ConfigError, match=f"answers of target '{target}', not '{moved}'"):
        run_train(make_job(moved, out, {}))


def test_the_fingerprint_sees_large_files_without_reading_them_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    content = bytearray(4 * 2**20)
    path.write_bytes(content)
    before = digest_target(tmp_path)
    assert digest_target(tmp_path) == before
    for start in range(0, len(content), 2**15):  # every other part of it
        content[start : start + 2**14] = b"x" * 2**14
    path.write_bytes(content)
    assert digest_target(tmp_path) != before


def test_data_without_a_record_is_used_and_recorded(target: Path, out: Path) -> None:
    for name in (OPTIONS, PROMPTS):
        (out / "data" / name).unlink()
    before, prompts = documents(out / "data"), [out / "prompts.txt"]
    for change, sentence in (
        ({"seed": 1}, "holds answers of seed 0, not 1"),
        ({"max_answer": 5}, "has an answer of .* tokens, which --max-answer 5 does not allow"),
    ):
        with pytest.raises(ConfigError, match=f"{sentence}.*--fresh-data"):
            run_data(make_job(target, out, change), prompts)
    said: list[str] = []
    run_data(replace(make_job(target, out, {}), say=said.append), prompts)
    assert any(
        "does not record its options; assuming that they are those of this command" in line
        for line in said
    )
    assert documents(out / "data") == before
    with pytest.raises(ConfigError, match="--max-answer 12, and --max-answer 24"):
        run_data(make_job(target, out, {"max_answer": 24}), prompts)


def test_options_of_answers_may_change_while_there_are_none(target: Path, out: Path) -> None:
    """As after an interrupt while prompts are invented: those are kept."""
    for path in [*(out / "data").glob("shard-*"), out / "data" / "manifest.json"]:
        path.unlink()
    invented = (out / "data" / INVENTED).read_text()
    with pytest.raises(ConfigError, match="--seed 0, and --seed 1"):
        run_data(make_job(target, out, {"seed": 1}), [out / "prompts.txt"])
    fewer = write_prompts(out / "prompts.txt", 2)
    run_data(make_job(target, out, {"max_answer": 8}), [fewer])
    assert (out / "data" / INVENTED).read_text() == invented
    corpus = load_corpus(out / "data")
    assert len(corpus) < 6 and (corpus.lengths - corpus.prompt_lens).max() == 8


def test_fresh_data_discards_what_was_made(target: Path, out: Path) -> None:
    (out / "data" / "notes.txt").write_text("mine")
    (out / "train").mkdir()
    (out / "train" / "checkpoint.pt").write_text("of the old data")
    (out / "commands.txt").write_text("stoop train-draft old\n")
    of_a_worker = ShardStore(out / "data", {"seed": 0}, worker=1)
    of_a_worker.add([1, 2], [3] * 40, (7, 0), greedy=True)
    of_a_worker.flush(1.0)
    before, first = files(out), documents(out / "data")
    job = make_job(target, out, {"max_answer": 20}, fresh_data=True, command=("new",))
    with pytest.raises(ConfigError, match="does not exist"):
        run_data(job, [out / "absent.txt"])
    assert files(out) == before, "a mistake costs no data"
    run_data(job, [out / "prompts.txt"])
    corpus = load_corpus(out / "data")
    assert (corpus.lengths - corpus.prompt_lens).max() == 20
    assert len(corpus) == len(first) - 1 and (1, 2, *[3] * 40) not in documents(out / "data")
    assert (out / "data" / "notes.txt").read_text() == "mine"
    assert not (out / "train" / "checkpoint.pt").exists()
    assert (out / "commands.txt").read_text() == "new\n"


def test_a_refused_command_is_not_noted(target: Path, out: Path) -> None:
    job = make_job(target, out, {"max_answer": 20}, command=("stoop", "refused"))
    with pytest.raises(ConfigError):
        run_data(job, [out / "prompts.txt"])
    assert job.commands() == []


# ---- the command ----


def invoke(target: Path, out: Path, *flags: str) -> str:
    """What it is refused with; nothing if it is not."""
    args = ["train-draft", str(target), "--out", str(out), "--device", "cpu", "--max-len", "400"]
    small_head = ["--draft-vocab", "64", "--steps", "2", "--ttt-steps", "2"]
    done = CliRunner().invoke(app, [*args, *small_head, *flags])
    assert done.exception is None or isinstance(done.exception, ConfigError), done.exception
    return str(done.exception or "")


def test_stages_after_the_data_refuse_data_options_that_do_not_fit(target: Path, out: Path) -> None:
    train = ("--stage", "train")
    assert "was made with --max-answer 12, not --max-answer 48" in invoke(
        target, out, *train, "--max-answer", "48"
    )
    write_prompts(out / "more.txt", 7)
    assert "made with other prompts" in invoke(
        target, out, *train, "--prompts", str(out / "more.txt")
    )
    assert "use --stage all or data" in invoke(target, out, *train, "--fresh-data")
    # Options that are not given, or as they were, are no matter.
    prompts = str(out / "prompts.txt")
    assert not invoke(target, out, *train, "--max-answer", "12", "--prompts", prompts)
    assert "no --taps, not with --taps 1,2" in invoke(
        target, out, "--stage", "export", "--taps", "1,2"
    )
    assert not invoke(target, out, "--stage", "export")


def test_the_command_says_no_to_a_changed_answer_length(target: Path, out: Path) -> None:
    flags = ("--prompts", str(out / "prompts.txt"), "--invent", "2", "--max-num-seqs", "4")
    assert "--max-answer 12, and --max-answer 512" in invoke(target, out, *flags)
    assert not invoke(target, out, *flags, "--max-answer", "24", "--fresh-data")
    assert (out / "head" / "config.json").exists()
