"""`stoop pull`: fetch a model once, so that later starts are quick."""

from typing import Annotated

import typer

from stoop.cli.progress import StageProgress


def pull(
    name: Annotated[str, typer.Argument(help="smollm2-135m, or a hub id")] = "smollm2-135m",
) -> None:
    """Fetch a model into the cache (STOOP_CACHE, or the user's cache folder)."""
    from stoop.checkpoint.fetch import pull as fetch

    with StageProgress() as report:
        folder = fetch(name, report=report)
    print(f"{name} is in {folder}")
