"""`stoop pull`: download a model ahead of its first use."""

import signal
from types import FrameType
from typing import Annotated

import typer

from stoop.cli.progress import StageProgress
from stoop.config.schema import DEFAULT_MODEL
from stoop.core.report import Report


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="smollm2-135m (93 MB to download; 200 MB on disk for a CPU, 540 MB for a GPU), or "
            "a hub id such as org/name"
        ),
    ] = DEFAULT_MODEL,
) -> None:
    """Download a model, so that later starts need no network.

    smollm2-135m goes into stoop's cache (STOOP_CACHE, or ~/.cache/stoop), as a start with default
    options on this machine needs it.

    Models from the Hugging Face hub go into the hub's cache (HF_HOME). 'stoop models' lists both.
    """
    # Converting a GGUF file needs the registered model families.
    import stoop.models.registry  # noqa: F401
    from stoop.checkpoint.fetch import EMBEDDED
    from stoop.checkpoint.fetch import pull as fetch

    # By default these signals end Python without cleanup, which would leave half a download.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with StageProgress() as report:
        packed = name in EMBEDDED and _starts_packed(name, report)
        folder = fetch(name, report=report, packed=packed)
    print(f"{name} is in {folder}")


def _starts_packed(name: str, report: Report) -> bool:
    """Whether a start with default options would keep the weights quantised."""
    from stoop.config.schema import EngineOptions
    from stoop.engine.choose_weights import choose_packed
    from stoop.worker.device import find_device

    return choose_packed(EngineOptions(model=name), find_device("auto"), report)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
