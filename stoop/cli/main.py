"""The `stoop` command."""

import logging
import sys
from typing import Annotated, Any

import typer

from stoop.cli.bench import bench
from stoop.cli.chat import chat
from stoop.cli.check import check
from stoop.cli.compare import compare
from stoop.cli.draft_vocab import draft_vocab
from stoop.cli.failures import explain
from stoop.cli.generate import generate
from stoop.cli.help import HelpfulGroup
from stoop.cli.logs import set_up_logging
from stoop.cli.models import models
from stoop.cli.pull import pull
from stoop.cli.serve import serve
from stoop.cli.streams import ReaderGone, settle_output, standard_streams
from stoop.cli.train import train_draft
from stoop.cli.tune import tune
from stoop.config.environ import log_level
from stoop.version import __version__

log = logging.getLogger(__name__)

app = typer.Typer(
    cls=HelpfulGroup,
    help="An LLM inference engine: exact, fast, readable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(pull)
app.command()(check)
app.command()(compare)
app.command()(tune)
app.command()(train_draft)
app.command()(draft_vocab)
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
            "--version", help="print the version and exit", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    set_up_logging(log_level())


def main() -> None:
    """Run a command; an error that the user can fix is one sentence, not a traceback."""
    with standard_streams():
        code = _run(sys.argv[1:])
    raise SystemExit(code)


def _run(args: list[str]) -> int:
    """Return the exit code: 0, 1 if a check failed, 2 for an error, or that of a signal."""
    try:
        sys.stdout.write("")  # fails early if standard output is closed
        code = _invoke(args)
        sys.stdout.flush()  # a full disk must be reported before the interpreter exits
        return code
    except (KeyboardInterrupt, typer.Abort):  # Abort: Ctrl-C at a question
        print(file=sys.stderr)
        code = 130
    except ReaderGone:
        code = 141
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        log.debug("the traceback of this error:", exc_info=error)
        print(sentence, file=sys.stderr)
        code = 2
    settle_output()
    return code


def _invoke(args: list[str]) -> int:
    """Run the command like typer, but let errors through."""
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context("stoop", args) as context:
            command.invoke(context)
    except typer.Exit as leaving:
        return leaving.exit_code
    return 0
