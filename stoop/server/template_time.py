"""Limits on how long a chat template may run.

A template is a program that came with the checkpoint. Short conversations are rendered on the event
loop, since a thread costs a first token more than rendering does; an alarm ends a template that
holds the loop up. Then, and for all others, a thread does it, where a longer limit holds.
"""

import asyncio
import ctypes
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from stoop.server.errors import refuse

Item = TypeVar("Item")


class TookLong(BaseException):
    """Raised inside work that has run for too long. No `except Exception` there may keep it."""


# ---- on the event loop ----


class _Alarm:
    """SIGALRM, whose handler raises an exception inside the work at hand."""

    def __init__(self) -> None:
        self._armed = False

    def may_be_set(self) -> bool:
        """Whether this is the thread that gets signals, and no one else uses this one."""
        if threading.current_thread() is not threading.main_thread():
            return False
        handler = signal.getsignal(signal.SIGALRM)
        if handler is signal.SIG_DFL:
            signal.signal(signal.SIGALRM, self._ring)
        return handler is signal.SIG_DFL or handler == self._ring

    def limit(self, work: Callable[[], Item], seconds: float) -> Item:
        self._armed = True
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return work()
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, number: int, frame: Any) -> None:
        if self._armed:
            self._armed = False  # it may ring while `limit` is about to return
            raise TookLong


_ALARM = _Alarm()


def run_briefly(work: Callable[[], Item], seconds: float) -> Item:
    """Run `work` here. Raises `TookLong` if it takes longer, or if nothing here could end it."""
    if not _ALARM.may_be_set():
        raise TookLong
    return _ALARM.limit(work, seconds)


# ---- in a thread ----


async def run_in_thread(
    threads: ThreadPoolExecutor, work: Callable[[], Item], seconds: float
) -> Item:
    """Run `work` in a thread, and end it there if it takes too long.

    The time counts from when a thread takes it up: waiting for one is not the template's fault.
    The exception is raised between two bytecodes of the thread, and only while it is inside `work`.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Item] = loop.create_future()
    lock = threading.Lock()
    running: list[tuple[int, float]] = []  # the thread, and since when
    timer: asyncio.TimerHandle

    def guarded() -> Item:
        with lock:
            running.append((threading.get_ident(), time.monotonic()))
        try:
            return work()
        finally:
            with lock:
                running.clear()

    def look() -> None:
        """End work that has had its time; look again later if it has not."""
        nonlocal timer
        with lock:
            left = running[0][1] + seconds - time.monotonic() if running else seconds
            if left <= 0:
                _raise_in(running[0][0])
        if left > 0:
            timer = loop.call_later(left, look)
        elif not answer.done():
            answer.set_exception(
                refuse(
                    f"the chat template took more than {seconds:g} s on these messages: shorten "
                    "them"
                )
            )

    future = loop.run_in_executor(threads, guarded)
    future.add_done_callback(lambda done: _hand_on(done, answer))
    timer = loop.call_later(seconds, look)
    try:
        return await answer
    finally:
        timer.cancel()


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookLong))


def _hand_on(done: "asyncio.Future[Item]", answer: "asyncio.Future[Item]") -> None:
    """Give a result, or an error, to the one who waits, if there still is one."""
    if done.cancelled():
        answer.cancel()
        return
    error = done.exception()
    if answer.done():
        return
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)
