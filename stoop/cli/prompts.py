"""Prompts from the command line and from standard input, checked before a model is loaded."""

import select
import sys

from stoop.cli.streams import as_text
from stoop.config.errors import RequestError

SAY_AFTER = 2.0  # seconds without any input
GIVE_UP_AFTER = 60.0  # a program that writes to us may have to load a model first
HOW = 'add --prompt "your text", or pipe it in'


def read_prompts(given: list[str]) -> list[str]:
    """`-` stands for standard input; without any prompt it is read if it is not a terminal."""
    if given.count("-") > 1:
        raise RequestError("--prompt - is given twice, and standard input can be read only once")
    prompts = [
        _read_input() if text == "-" else as_text(text, f"prompt {number}")
        for number, text in enumerate(given, start=1)
    ]
    if not given:
        prompts = [_read_piped()]
    for number, text in enumerate(prompts, start=1):
        if not text:
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            raise RequestError(f"{which} is empty: give it some text")
    return prompts


def _read_input() -> str:
    """All of it. The end of its last line is not part of the prompt."""
    return as_text(sys.stdin.read(), "standard input").removesuffix("\n")


def _read_piped() -> str:
    """What is piped in though it was not asked for.

    Schedulers and build machines start programs with an input that never gets any data nor ends: it
    is not waited for without end.
    """
    if sys.stdin.isatty():
        raise RequestError(f"there is no prompt: {HOW}")
    if not _has_input(SAY_AFTER):
        print("waiting for a prompt on standard input ...", file=sys.stderr, flush=True)
        if not _has_input(GIVE_UP_AFTER - SAY_AFTER):
            raise RequestError(
                f"there is no prompt: nothing came on standard input in {GIVE_UP_AFTER:.0f} s; add "
                '--prompt "your text", or --prompt - to wait for as long as it takes'
            )
    text = _read_input()
    if not text:
        raise RequestError(f"there is no prompt: standard input is empty; {HOW}")
    return text


def _has_input(timeout: float) -> bool:
    """Whether there is something to read, or its end, within so many seconds."""
    try:
        return bool(select.select([sys.stdin], [], [], timeout)[0])
    except (OSError, ValueError):  # not a file, or a system that waits for sockets only
        return True
