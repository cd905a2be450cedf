"""Calls a function in a process of its own, so that what it allocates goes when it is done."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns; a text that says why if it raised or its process died."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        return f"the process ended with code {process.exitcode}"
    finally:
        process.join()


def _send(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        connection.send(function(*args))
    except Exception as error:
        connection.send(describe(error))


def describe(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
