"""Drafters by method."""

from collections.abc import Callable

from stoop.config.speculation import declare_method
from stoop.models.base import DraftModel
from stoop.spec.base import DraftSetup, Speculator
from stoop.spec.eagle import EagleSpeculator
from stoop.spec.ngram import NgramSpeculator

# A method's drafter, made of what it shares with the target and of its draft model, if it has one.
MakeSpeculator = Callable[[DraftSetup, DraftModel | None], Speculator]


def _eagle(setup: DraftSetup, draft_model: DraftModel | None) -> Speculator:
    assert draft_model is not None
    return EagleSpeculator(setup, draft_model)


SPECULATORS: dict[str, MakeSpeculator] = {
    "eagle": _eagle,
    "eagle3": _eagle,
    "mtp": _eagle,
    "ngram": lambda setup, draft_model: NgramSpeculator(setup),
}


def register_drafter(method: str, make: Callable[[DraftSetup], Speculator]) -> None:
    """Let `speculative_config` name a drafter that has no weights, from now on in this process."""
    declare_method(method)
    SPECULATORS[method] = lambda setup, draft_model: make(setup)


def make_speculator(setup: DraftSetup, draft_model: DraftModel | None) -> Speculator:
    assert setup.config.spec is not None
    return SPECULATORS[setup.config.spec.method](setup, draft_model)
