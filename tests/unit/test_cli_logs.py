"""Log lines wait until an answer is printed."""

import logging

import pytest

from stoop.cli.logs import HoldingHandler, logs_held


def interrupted() -> None:
    with logs_held():
        logging.warning("cut short")
        raise KeyboardInterrupt


def test_lines_wait_for_the_end_of_the_answer(capsys: pytest.CaptureFixture) -> None:
    handler = HoldingHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        logging.warning("before")
        with logs_held():
            logging.warning("during")
            assert capsys.readouterr().err == "before\n"
        assert capsys.readouterr().err == "during\n"
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert capsys.readouterr().err == "cut short\n"
        logging.warning("after")
        assert capsys.readouterr().err == "after\n"
    finally:
        root.removeHandler(handler)
