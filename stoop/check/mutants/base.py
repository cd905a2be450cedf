"""What a mutant is: a bug, how it is put back into the engine, and what must catch it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock


class Patch:
    """Replaces attributes; leaving it as a context manager restores them, last one first."""

    def __init__(self) -> None:
        self._replaced = ExitStack()

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute that exists. owner: a class, a module or an instance"""
        self._replaced.enter_context(mock.patch.object(owner, name, value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._replaced.close()


@dataclass(frozen=True)
class Mutant:
    """A bug, where it is put back, and what catches it."""

    name: str
    apply: Callable[[Patch], None]  # puts the bug back until the patch is left
    mode: str
    backend: str = "reference"
    buffer: str | None = None  # that the sanitizer must name
    by_sanitizer: bool = True
    by_equality: bool = True  # of answers, and of drafts at every position, with eager steps
    refusal: str | None = None  # part of the error that refuses it, with or without the sanitizer
    mechanism: int | None = None  # of the five in docs/graphs.md
    report: int | None = None  # number of the vLLM pull request that mended this very bug
    drafter: str | None = None  # None for a bug in the target's graphs; see workloads.py
    num_drafts: int = 0

    @property
    def label(self) -> str:
        return f"{self.name} ({self.mode}, {self.backend})"


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Put the bug back for a while. Engines must be made inside: most bugs are in captures."""
    with Patch() as patch:
        mutant.apply(patch)
        yield
