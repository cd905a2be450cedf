"""Ctrl-C and SIGTERM raise KeyboardInterrupt, but not inside blocks that must complete."""

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
    """Raise KeyboardInterrupt for either signal; inside `held()`, raise it at the block's end."""
    if not _in_main_thread():  # Python delivers signals to the main thread only
        yield
        return
    _state.pending = False
    # A background job of a script ignores Ctrl-C and must keep ignoring it.
    caught = [each for each in SIGNALS if signal.getsignal(each) not in (signal.SIG_IGN, None)]
    before = [(each, signal.signal(each, _arrive)) for each in caught]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Make processes started in the block ignore Ctrl-C, unless they install a handler."""
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
    """Delay interrupts until the block ends. Use it for short blocks only: the user waits."""
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
