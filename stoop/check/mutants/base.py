"""What a mutant is: a bug, how it is put back into the engine, and what must catch it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self
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


class Replaces(Protocol):
    """`Patch`, or what pytest has for the same purpose."""

    def setattr(self, owner: Any, name: str, value: Any) -> None: ...


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
    by_builds: bool = False  # by the number of times that a step builds the target's metadata
    refusal: str | None = None  # part of the error that refuses it, with or without the sanitizer
    mechanism: int | None = None  # of the five in docs/graphs.md
    report: int | None = None  # number of the vLLM pull request that mended this very bug
    drafter: str | None = None  # None for a bug in the target's graphs; see harness.py
    num_drafts: int = 0
    model: str | None = None  # a hybrid of check/graphs.py, for a bug in its recurrent state

    # Not in an attention backend, and harmless to a GPU's context: it can run with triton there.
    any_backend: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} ({self.mode}, {self.model or self.backend})"

    @property
    def part(self) -> str:
        """Of an engine, that has the bug."""
        if self.model is not None:
            return "state"
        return "target" if self.drafter is None else "draft"

    @property
    def cells(self) -> tuple[str, str]:
        """What catches it, for tables: the cells for equality and for the sanitizer."""
        if self.refusal is not None:
            return "refused", "refused"
        named = f"`{self.buffer}`" if self.buffer is not None else "yes"
        sanitizer = "no, but built twice" if self.by_builds else "no"
        return "yes" if self.by_equality else "no", named if self.by_sanitizer else sanitizer


DRAFTER, NUM_DRAFTS = "eagle3-noisy", 3
draft_mutant = functools.partial(Mutant, drafter=DRAFTER, num_drafts=NUM_DRAFTS)


# What a mutant raises that no longer fits the code which it patches.
_STRAY = ("TypeError", "AttributeError", "NameError", "ImportError")


def is_stray(error: str | None) -> bool:
    """Whether an error, as text after the name of its type, is the mutant's own."""
    return error is not None and error.startswith(_STRAY)


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Put the bug back for a while. Engines must be made inside: most bugs are in captures."""
    with Patch() as patch:
        mutant.apply(patch)
        yield
