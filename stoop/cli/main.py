"""The `stoop` command."""

import logging
import sys
from typing import Annotated

import typer

from stoop.cli.bench import bench
from stoop.cli.chat import chat
from stoop.cli.check import check
from stoop.cli.compare import compare
from stoop.cli.generate import generate
from stoop.cli.models import models
from stoop.cli.pull import pull
from stoop.cli.train import train_draft
from stoop.cli.tune import tune
from stoop.config.environ import log_level
from stoop.config.errors import StoopError
from stoop.version import __version__

app = typer.Typer(
    help="An LLM inference engine: exact, fast, readable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(pull)
app.command()(check)
app.command()(compare)
app.command()(tune)
app.command()(train_draft)
app.add_typer(bench, name="bench")
app.add_typer(models, name="models")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"stoop {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="print the version and leave", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    logging.basicConfig(level=log_level(), format="%(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Run a command; an error that the user can mend is one sentence, not a traceback."""
    try:
        app()
    except StoopError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
