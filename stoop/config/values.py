"""Values that users pass: converts them from numpy or torch, and shows them in messages."""

import difflib
from collections.abc import Iterable
from typing import Any, TypeGuard

MAX_SHOWN = 80  # characters of a value in a message


def plain(value: Any) -> Any:
    """Turn numbers and arrays of numpy and torch into Python's own; return anything else as it is.

    They are recognised by their methods, so that neither library has to be imported.
    """
    if isinstance(value, type) or not (hasattr(value, "tolist") and hasattr(value, "ndim")):
        return value
    try:
        return value.tolist()
    except Exception:  # a tensor without values; the check of its type will refuse it
        return value


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: object) -> str:
    """The value for a message: on one line, truncated if long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the repr of any object, or of an integer with too many digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence for an unknown name, with the closest known name or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.7)
    advice = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
    return f"unknown {kind} {shown(name)}: {advice}"
