"""Optional matplotlib: without it, plots are skipped."""

from collections.abc import Callable
from typing import Any


def find_pyplot(what: str, say: Callable[[str], None]) -> Any:
    """Import pyplot, set up to draw into files. Without matplotlib, say so and return None."""
    try:
        import matplotlib
    except ImportError:
        say(f"no {what}: matplotlib is not installed (pip install 'stoop[train]')")
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
