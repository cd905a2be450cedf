"""The lines of a chat: editing, history, and input that is not a terminal."""

import io
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoop.cli import lines
from stoop.cli.lines import History, LineReader
from stoop.config.errors import RequestError
from support.terminal import Terminal

# What `stoop chat` does with lines, without a model.
ECHO = """
import sys
{before}
from stoop.cli.lines import LineReader
from stoop.cli.streams import standard_streams

with standard_streams():
    reader = LineReader()
    while (line := reader.read()) is not None:
        print("got", ascii(line), flush=True)
    print("end", flush=True)
"""
UP, LEFT = "\x1b[A", "\x1b[D"


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts a conversation on a terminal that knows arrow keys."""
    open_ones = []

    def start(before: str = "", **environment: str) -> Terminal:
        environment = {"TERM": "xterm", "STOOP_CACHE": str(tmp_path / "cache")} | environment
        terminal = Terminal([sys.executable, "-c", ECHO.format(before=before)], **environment)
        open_ones.append(terminal)
        terminal.wait_for("> ")
        return terminal

    yield start
    for terminal in open_ones:
        terminal.close()


def enter(terminal: Terminal, text: str | bytes, got: str) -> None:
    terminal.type(text if isinstance(text, bytes) else text + "\n")
    terminal.wait_for(f"got {got!r}")
    terminal.wait_for("> ")


def leave(terminal: Terminal) -> int:
    """End the conversation; returns the exit status."""
    terminal.type("\x04")
    terminal.wait_for("end")
    return terminal.process.wait(timeout=60)


def test_lines_are_edited_and_recalled(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    first = chat()
    enter(first, f"ac{LEFT}b", "abc")
    enter(first, "second", "second")
    enter(first, f"{UP}{UP}", "abc")
    assert leave(first) == 0
    later = chat()
    enter(later, f"{UP}{UP}", "second")
    assert leave(later) == 0
    file = tmp_path / "cache" / lines.HISTORY
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert History(file).lines == ["abc", "second", "abc", "second"]


def test_a_conversation_that_is_killed_keeps_its_history(
    chat: Callable[..., Terminal], tmp_path: Path
) -> None:
    terminal = chat()
    enter(terminal, "remember me", "remember me")
    terminal.process.kill()
    assert History(tmp_path / "cache" / lines.HISTORY).lines == ["remember me"]


def test_ctrl_c_clears_a_line(chat: Callable[..., Terminal]) -> None:
    terminal = chat()
    terminal.type("half a li")
    terminal.wait_for("half a li")
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("> ")
    enter(terminal, "whole", "whole")
    assert leave(terminal) == 0


def test_a_python_without_readline_reads_lines(
    chat: Callable[..., Terminal], tmp_path: Path
) -> None:
    terminal = chat("sys.modules['readline'] = None")
    enter(terminal, "plain", "plain")
    assert leave(terminal) == 0
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_costs_the_history_alone(
    chat: Callable[..., Terminal], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    terminal = chat(STOOP_CACHE=str(tmp_path / "file"))
    enter(terminal, "hello", "hello")
    enter(terminal, UP, "hello")
    assert leave(terminal) == 0


def test_bytes_that_are_no_text_are_refused_and_the_next_line_is_read(
    chat: Callable[..., Terminal],
) -> None:
    terminal = chat("sys.modules['readline'] = None")
    terminal.type(b"a\xff\n")
    terminal.wait_for("error: the line is not valid UTF-8")
    terminal.wait_for("> ")
    enter(terminal, "fine", "fine")
    assert leave(terminal) == 0


def test_an_ascii_terminal_sends_utf_8(chat: Callable[..., Terminal]) -> None:
    terminal = chat("sys.modules['readline'] = None", PYTHONIOENCODING="ascii")
    terminal.type("hé\n")
    terminal.wait_for(r"got 'h\xe9'")
    terminal.wait_for("> ")
    assert leave(terminal) == 0


# ---- no terminal ----


def test_a_pipe_gets_no_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo"))
    reader = LineReader()
    assert [reader.read() for _ in range(4)] == ["one", "", "two", None]
    assert capsys.readouterr() == ("", "")


def test_a_pipe_that_is_no_text_ends_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntw\udcff\nthree\n"))
    reader = LineReader()
    assert reader.read() == "one"
    with pytest.raises(RequestError, match="not valid UTF-8"):
        reader.read()


# ---- history ----


def test_what_is_kept(tmp_path: Path) -> None:
    history = History(tmp_path / "deep" / "history")
    lines_typed = ["a", "a", "", "  ", "two\nlines", "é", "\udcff", "x" * (lines.MAX_LINE + 1), "a"]
    assert [history.add(line) for line in lines_typed] == [
        *(True, False, False, False),
        *(True, True, True, False, True),
    ]
    assert History(history.path).lines == ["a", "two\nlines", "é", "\udcff", "a"]


def test_a_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_HISTORY", 3)
    history = History(tmp_path / "history")
    for number in range(5):
        history.add(str(number))
    assert History(history.path).lines == ["2", "3", "4"]
    assert history.path.read_text().count("\n") == 3
    assert stat.S_IMODE(history.path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [history.path]


def test_conversations_side_by_side_keep_all_lines(tmp_path: Path) -> None:
    one, other = History(tmp_path / "history"), History(tmp_path / "history")
    one.add("a")
    other.add("b")
    one.add("c")
    assert History(tmp_path / "history").lines == ["a", "b", "c"]


def test_a_broken_history_is_no_obstacle(tmp_path: Path) -> None:
    file = tmp_path / "history"
    file.write_bytes(b'"good"\n{"not": "a line"}\nnot json\n\xff\xfe\n"also"\n')
    assert History(file).lines == ["good", "also"]
