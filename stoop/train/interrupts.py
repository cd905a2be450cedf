"""Ctrl-C and SIGTERM: both raise KeyboardInterrupt, but not in the middle of what must be whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class _State:
    num_holds: int = 0
    pending: bool = False


_state = _State()


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for either signal, or at the end of `held()` if it came inside."""
    if not _in_main_thread():  # signals never arrive in another one
        yield
        return
    _state.pending = False
    # A job in the background of a script ignores Ctrl-C, and keeps ignoring it.
    caught = [each for each in SIGNALS if signal.getsignal(each) not in (signal.SIG_IGN, None)]
    before = [(each, signal.signal(each, _arrive)) for each in caught]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """By processes that are started in the block, as long as they do not ask for it."""
    if not _in_main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def held() -> Iterator[None]:
    """Let the block finish first. Only for short ones: the user waits."""
    if not _in_main_thread():
        yield
        return
    _state.num_holds += 1
    try:
        yield
    finally:
        _state.num_holds -= 1
    if _state.pending and not _state.num_holds:
        _state.pending = False
        raise KeyboardInterrupt


def _arrive(number: int, frame: FrameType | None) -> None:
    if _state.num_holds:
        _state.pending = True
    else:
        raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
