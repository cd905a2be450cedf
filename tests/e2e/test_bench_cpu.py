"""`stoop bench cpu` on a tiny GGUF file, with a llama.cpp of a few lines."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from stoop.bench.cpu_process import LLAMA_CPP, EngineFailed, EngineProcess, EngineSpec
from support.gguf_files import random_tensors, write_gguf

Run = Callable[..., tuple[int, str, str]]

LLAMA = """
import json, os
__version__ = "9.9"


class Llama:
    def __init__(self, **options):
        with open(os.environ["FAKE_SEEN"], "a") as file:
            file.write(json.dumps(options) + "\\n")
        print("llama.cpp says something first")
        os.system("echo from below Python")
        self.fresh = False

    def reset(self):
        self.fresh = True

    def generate(self, tokens, temp, top_k, repeat_penalty):
        assert self.fresh and temp == 0.0 and top_k == 1 and repeat_penalty == 1.0
        self.fresh = False
        number = 0
        while True:
            yield number % 7
            number += 1
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    kind = gguf.GGMLQuantizationType.Q8_0
    return str(write_gguf(tmp_path / "tiny.gguf", random_tensors(), kind=kind))


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the options end that llama.cpp was started with."""
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen.jsonl"))
    return tmp_path / "seen.jsonl"


def test_the_whole_command(stoop: Run, model: str, seen: Path, tmp_path: Path) -> None:
    args = ["--max-tokens", "6", "--prompt-len", "16", "--limit", "1", "--rounds", "2"]
    args += ["--retries", "0", "--threads", "1", "--peers", "llama.cpp"]
    (tmp_path / "questions.jsonl").write_text('{"turns": ["abc", "later"]}\n{"turns": ["b"]}\n')
    args += ["--questions", str(tmp_path / "questions.jsonl")]
    code, out, err = stoop("bench", "cpu", model, *args)
    assert code == 0, err
    record = json.loads(out.splitlines()[-1])
    ours, theirs = record["engines"]
    assert (record["model"], record["threads"], record["num_questions"]) == (model, 1, 1)
    assert (ours["engine"], theirs["engine"]) == ("stoop", "llama.cpp")
    assert theirs["version"] == "llama-cpp-python 9.9"
    for each in record["engines"]:
        assert each["decode_tokens_per_s"] > 0 and each["ttft_ms"] > 0
        assert len(each["decode_tokens_per_s_by_round"]) == 2
        assert each["import_s"] > 0 and each["load_s"] >= 0
        memory = each["memory_mib"]
        assert memory["rss"] >= memory["file"] > 0 and memory["anon"] > 0
    assert ours["tokens_per_step"] == 1.0 and theirs["tokens_per_step"] is None
    if not ours["disturbed_rounds"] and not theirs["disturbed_rounds"]:
        assert ours["decode_of_llama_cpp"] == pytest.approx(
            ours["decode_tokens_per_s"] / theirs["decode_tokens_per_s"], rel=1e-3
        )
    assert list(record["missing"]) == ["stoop, drafts"] and "no head ships" in err
    starts = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(starts) == 2 and starts[0] == starts[1]  # the first one fills caches
    assert starts[0]["model_path"] == model and starts[0]["n_ctx"] >= 16 + 6
    assert starts[0]["n_threads"] == starts[0]["n_threads_batch"] == 1


def test_what_a_library_prints_does_not_disturb(seen: Path) -> None:
    process = EngineProcess(EngineSpec("llama.cpp", LLAMA_CPP, "m"), context=64, threads=2)
    try:
        reply = process.ask(do="answer", prompt=[1, 2], num_tokens=9)
        assert reply["tokens"] == [0, 1, 2, 3, 4, 5, 6, 0, 1]
        assert reply["times"] == sorted(reply["times"]) and len(reply["times"]) == 9
        assert process.cpu_s > 0 and process.import_s > 0
        with pytest.raises(EngineFailed, match=r"^llama.cpp: AttributeError: .*together"):
            process.ask(do="together", prompts=[[1]], num_tokens=2)
        assert process.ask(do="answer", prompt=[1], num_tokens=1)["tokens"] == [0]
    finally:
        process.close()


@pytest.mark.parametrize(
    ("accident", "message"),
    [
        ("os.kill(os.getpid(), 4)", "its process was ended by SIGILL"),
        ("os._exit(3)", "its process ended with status 3"),
        ("raise RuntimeError('no such file')", "RuntimeError: no such file"),
    ],
)
def test_an_engine_that_dies_is_named(
    seen: Path, capfd: pytest.CaptureFixture[str], accident: str, message: str
) -> None:
    """With what it said last."""
    dying = LLAMA.replace("self.fresh = False\n\n    def reset", f"{accident}\n\n    def reset")
    assert dying != LLAMA
    (seen.parent / "llama_cpp.py").write_text(dying)
    with pytest.raises(EngineFailed, match=message):
        EngineProcess(EngineSpec("llama.cpp", LLAMA_CPP, "m"), context=64, threads=2)
    assert ("from below Python" in capfd.readouterr().err) == ("process" in message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["org/name"], "no GGUF file"),
        (["nothing.gguf"], "nothing.gguf does not exist: check the path"),
        (["MODEL", "--gguf", "MODEL"], "is for smollm2-135m: leave it out"),
        (["--gguf", "nothing.gguf"], "nothing.gguf does not exist"),
        (["MODEL", "--peers", "vllm"], "--peers has 'vllm': use auto, none, llama.cpp"),
        (["MODEL", "--peers", "none,llama.cpp"], "use auto or none alone"),
        (["MODEL", "--peers", "none", "--llama-python", "p"], "needs llama.cpp in --peers"),
        (["MODEL", "--llama-python", "no/python"], "--llama-python no/python cannot be run"),
        (["MODEL", "--concurrency", "0"], "use numbers of at least 1"),
        (["MODEL", "--out", "no/folder/out.json"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_is_refused(stoop: Run, model: str, args: list[str], message: str) -> None:
    code, out, err = stoop("bench", "cpu", *(model if each == "MODEL" else each for each in args))
    assert code != 0 and out == "" and message in " ".join(err.split())
    assert err.count("error:") == 1


def test_a_file_that_is_not_quantised_is_refused(stoop: Run, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "dense.gguf", random_tensors())
    code, _, err = stoop("bench", "cpu", str(file))
    assert code != 0 and "cannot stay quantised" in err and "Q4_K" in err


def test_a_missing_peer_is_refused_only_if_it_was_asked_for(
    stoop: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoop.bench import cpu_process
    from stoop.cli.bench.cpu import _choose_peers, _find_peers

    monkeypatch.setitem(cpu_process.MODULES, LLAMA_CPP, "no_such_module")
    names, asked = _choose_peers("auto", None)
    present, missing = _find_peers(names, asked, None)
    assert LLAMA_CPP not in present
    assert missing[LLAMA_CPP].startswith("not measured: this Python has no llama-cpp-python: pip")
    for args in (["--peers", "llama.cpp"], ["--llama-python", sys.executable]):
        code, _, err = stoop("bench", "cpu", model, *args)
        assert code != 0 and "has no llama-cpp-python: pip install llama-cpp-python" in err
