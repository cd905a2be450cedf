"""Long test files begin first, so that no worker has to wait for another at the end."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from support.long_files import LONGEST_FILES

TESTS = Path(__file__).parents[1]


def test_every_long_file_is_there_once() -> None:
    assert [name for name in LONGEST_FILES if not (TESTS / name).is_file()] == []
    assert len(set(LONGEST_FILES)) == len(LONGEST_FILES)


def test_workers_begin_with_the_longest(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests of a file stay together, in their order; other files follow in theirs."""
    first, second = LONGEST_FILES[:2]
    given = [
        ("unit/test_params.py", 1),
        (second, 1),
        (second, 2),
        ("unit/test_docs.py", 1),
        (first, 1),
    ]
    items = [SimpleNamespace(path=TESTS / name, number=number) for name, number in given]
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    conftest.pytest_collection_modifyitems(items)
    assert [(str(i.path.relative_to(TESTS)), i.number) for i in items] == given
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    conftest.pytest_collection_modifyitems(items)
    assert [(str(i.path.relative_to(TESTS)), i.number) for i in items] == [
        (first, 1),
        (second, 1),
        (second, 2),
        ("unit/test_params.py", 1),
        ("unit/test_docs.py", 1),
    ]
    assert request.config.option.loadscopereorder is False  # xdist would sort them again
