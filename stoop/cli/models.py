"""`stoop models`: list and remove cached models."""

import sys
from typing import Annotated

import typer

models = typer.Typer()


@models.callback(invoke_without_command=True)
def list_cached(context: typer.Context) -> None:
    """List the models in stoop's cache and in the Hugging Face hub's, with their sizes.

    'stoop models rm NAME' removes one.
    """
    if context.invoked_subcommand is not None:
        return
    from stoop.checkpoint.cache import models_dir
    from stoop.checkpoint.hub import hub_cache_dir
    from stoop.checkpoint.inventory import list_models
    from stoop.core.report import show_bytes, show_path

    found = list_models()
    places = f"stoop: {show_path(models_dir())}, hub: {show_path(hub_cache_dir())}"
    if not found:
        print(f"no models are cached ({places})")
        return
    width = max(len(model.name) for model in found)
    print(f"{'NAME':{width}}  {'SIZE':>8}  PLACE")
    for model in found:
        note = f", {model.note}" if model.note else ""
        print(f"{model.name:{width}}  {show_bytes(model.num_bytes):>8}  {model.place}{note}")
    total = show_bytes(sum(model.num_bytes for model in found))
    print(f"{total} in total ({places})")


@models.command("rm")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(help="names listed by 'stoop models', or a converted .gguf file"),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")] = False,
) -> None:
    """Remove models from the cache, including their unfinished downloads."""
    from stoop.checkpoint.inventory import find_models, remove_models
    from stoop.config.errors import ConfigError
    from stoop.core.report import show_bytes

    found = {name: find_models(name) for name in names}
    if not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on: add --yes to remove without being asked")
    for name, cached in found.items():
        size = show_bytes(sum(model.num_bytes for model in cached))
        folders = ", ".join(str(model.folder) for model in cached)
        if not yes and not typer.confirm(f"remove {name} ({size} in {folders})?", err=True):
            print(f"kept {name}")
            continue
        remove_models(cached)
        print(f"removed {name} ({size})")
