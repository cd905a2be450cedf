<<<<<<< HEAD:stoop/plotting.py
"""Optional matplotlib: without it, plots are skipped."""
=======
"""matplotlib, if it is installed; otherwise plots are left out."""
>>>>>>> wt-words2:stoop/core/plotting.py

from collections.abc import Callable
from typing import Any


def find_pyplot(what: str, say: Callable[[str], None]) -> Any:
<<<<<<< HEAD:stoop/plotting.py
    """Import pyplot, set up to draw into files. Without matplotlib, say so and return None."""
=======
    """pyplot, set up to draw into files; None, after a message that `what` is left out."""
>>>>>>> wt-words2:stoop/core/plotting.py
    try:
        import matplotlib
    except ImportError:
        say(f"no {what}: matplotlib is not installed (pip install 'stoop[train]')")
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
