"""Arguments and checks that several benchmarks share."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stoop.bench.shape_configs import EAGLE3, ShapeHead
from stoop.config.errors import ConfigError

OutputLen = Annotated[int, typer.Option("--output-len", min=2, help="answer tokens per request")]


def parse_sizes(text: str, flag: str = "") -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        named = f"{flag} has {text!r}" if flag else repr(text)
        raise ConfigError(f"{named}: use numbers of at least 1 separated by commas, such as 1,8")
    return sizes


def make_head(
    kind: str | None, draft_vocab_size: int | None, drafts: Sequence[int | str]
) -> ShapeHead:
    """Make what drafts for a shape, from --head and --draft-vocab-size. drafts: each K"""
    if not any(drafts) and (kind is not None or draft_vocab_size is not None):
        raise ConfigError(
            "--head and --draft-vocab-size are for drafts, and --k 0 makes none: leave them out, "
            "or use a K above 0"
        )
    return ShapeHead(kind or EAGLE3.kind, draft_vocab_size)


def check_file(flag: str, path: Path | None, needs: str | None = None) -> None:
    """Refuse early a file that cannot be written. needs: a library that writing requires"""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: its folder does not exist, create it first")
    if path is not None and path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder: give a file")
    if path is not None and needs is not None and importlib.util.find_spec(needs) is None:
        raise ConfigError(f"{flag} needs {needs}: pip install 'stoop[train]', or leave it out")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
