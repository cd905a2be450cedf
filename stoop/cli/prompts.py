"""Prompts from the command line and from standard input, checked before a model is loaded."""

import select
import sys

from stoop.cli.streams import as_text
from stoop.config.errors import RequestError

SAY_AFTER = 2.0  # seconds without any input
GIVE_UP_AFTER = 60.0  # the program that writes to the pipe may load a model first
HOW = 'add --prompt "your text", or pipe it in'


def read_prompts(given: list[str]) -> list[str]:
    """Replace `-` by standard input; without any prompt, read it unless it is a terminal."""
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
    """Read all of standard input, without the final line break."""
    return as_text(sys.stdin.read(), "standard input").removesuffix("\n")


def _read_piped() -> str:
    """Read piped input that no `--prompt -` asked for.

    Job schedulers and CI start programs with a standard input that stays open without data, so
    this waits only for a limited time.
    """
    if sys.stdin.isatty():
        raise RequestError(f"there is no prompt: {HOW}")
    if not _has_input(SAY_AFTER):
        print("waiting for a prompt on standard input ...", file=sys.stderr, flush=True)
        if not _has_input(GIVE_UP_AFTER - SAY_AFTER):
            raise RequestError(
                f"there is no prompt: nothing came on standard input in {GIVE_UP_AFTER:.0f} s; add "
                '--prompt "your text", or --prompt - to wait without a limit'
            )
    text = _read_input()
    if not text:
        raise RequestError(f"there is no prompt: standard input is empty; {HOW}")
    return text


def _has_input(timeout: float) -> bool:
    """Return whether data or end of input arrives within `timeout` seconds."""
    try:
        return bool(select.select([sys.stdin], [], [], timeout)[0])
    except (OSError, ValueError):  # not a file, or a system that can only select sockets
        return True
