"""The script that runs all that needs a GPU."""

import sys
from pathlib import Path

import pytest

import check_gpu
from check_gpu import Job, list_jobs, run_all


def python(name: str, code: str) -> Job:
    return Job(name, (sys.executable, "-c", code))


def test_every_outcome_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [
        python("slow one", "import time; print('begins', flush=True); time.sleep(60)"),
        python("wrong", "print('so and so'); raise SystemExit(3)"),
        python("right", "print('7 passed')"),
    ]
    found = {each.job.name: each for each in run_all(jobs, tmp_path / "logs", 3, seconds=3)}
    statuses = {name: each.status for name, each in found.items()}
    assert statuses == {"slow one": "too slow", "wrong": "failed", "right": "passed"}
    assert found["wrong"].last_line == "so and so"
    assert (tmp_path / "logs" / "slow-one.log").read_text() == "begins\n"
    assert "passed " in capsys.readouterr().out


def test_all_files_and_all_tiny_models_are_there() -> None:
    jobs = list_jobs()
    names = {job.name for job in jobs}
    files = Path(check_gpu.ROOT / "tests/gpu").glob("test_*.py")
    assert {file.stem for file in files} < {name.split(":")[0] for name in names}
    assert len(names) == len(jobs)
    for stem in check_gpu.BY_TEST:  # several to a test function, by parameter
        assert len([name for name in names if name.startswith(f"{stem}: ")]) >= 9
    from stoop.check.graphs import TINY_CONFIGS

    assert names >= {*TINY_CONFIGS, "mutants"}


def test_a_file_of_skipped_tests_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    for code, status in (
        ("import pytest\npytest.importorskip('no_such_module')", "skipped"),
        ("def test_it(): pass", "passed"),
        ("import pytest\ndef test_it(): pytest.skip('no GPU')", "skipped"),
        ("import no_such_module", "failed"),
    ):
        path.write_text(code)
        job = Job("it", (*check_gpu.PYTEST, str(path)))
        assert [each.status for each in run_all([job], tmp_path / "logs", 1, 60)] == [status]


def test_checks_may_be_of_some_backends() -> None:
    chosen = ("--backends", "triton")
    with_them = {job.name for job in list_jobs("triton") if chosen == job.command[-2:]}
    assert len(with_them) == len(check_gpu.HEADS)  # and with drafts, -sc comes last
    with_drafts = [job for job in list_jobs("triton") if job.name.endswith("with drafts")]
    assert all("triton" in job.command and "-sc" in job.command for job in with_drafts)
    assert not any("--backends" in job.command for job in list_jobs())


def test_a_failure_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [python("a good one", "pass"), python("a bad one", "raise SystemExit(1)")]
    monkeypatch.setattr(check_gpu, "list_jobs", lambda backends: jobs)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--out", str(tmp_path)])
    assert check_gpu.main() == 1
    assert "2 jobs, not passed: a bad one" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "good"])
    assert check_gpu.main() == 0
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "no such"])
    with pytest.raises(SystemExit):
        check_gpu.main()
    assert "there are a good one, a bad one" in capsys.readouterr().err
