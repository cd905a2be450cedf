"""matplotlib, if it is installed; otherwise plots are left out."""

from collections.abc import Callable
from typing import Any


def find_pyplot(what: str, say: Callable[[str], None]) -> Any:
    """pyplot, set up to draw into files; None, after a message that `what` is left out."""
    try:
        import matplotlib
    except ImportError:
        say(f"no {what}: matplotlib is not installed (pip install 'stoop[train]')")
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
