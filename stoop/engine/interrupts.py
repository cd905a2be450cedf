"""Lets Ctrl-C take effect at chosen points only."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

FORCED_AFTER = 3  # presses of Ctrl-C


class HeldInterrupts:
    """Inside this block, Ctrl-C waits for the next call of `check`, or for the end of the block.

    Python runs signal handlers on the main thread between any two instructions, so a
    KeyboardInterrupt could come in the middle of a step. Other threads never get one; there this
    does nothing. A handler that is not written in Python, or that ignores Ctrl-C, stays in place.
    The third press does not wait, in case a step hangs.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._num_pressed = 0
        self._frame: FrameType | None = None

    def __enter__(self) -> "HeldInterrupts":
        if threading.current_thread() is not threading.main_thread():
            return self
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        handler = self._handler
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            self.check()

    def check(self) -> None:
        """Run the handler if Ctrl-C was pressed meanwhile. The default one raises."""
        if self._num_pressed:
            self._deliver()

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        self._num_pressed += 1
        self._frame = frame
        if self._num_pressed >= FORCED_AFTER:
            self._deliver()

    def _deliver(self) -> None:
        assert self._handler is not None
        self._num_pressed, frame, self._frame = 0, self._frame, None
        self._handler(signal.SIGINT, frame)
