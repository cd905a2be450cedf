"""matplotlib, where it is installed: pictures are left out where it is not."""

from collections.abc import Callable
from typing import Any


def find_pyplot(what: str, say: Callable[[str], None]) -> Any:
    """The module, drawing into files; None, with a line that says that `what` is left out."""
    try:
        import matplotlib
    except ImportError:
        say(f"no {what}: matplotlib is not installed (pip install 'stoop[train]')")
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
