"""Which models a parity test runs with which of its options."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from support.checkpoints import ARCHITECTURES, HYBRIDS, PLAIN, VARIANTS

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))


def models_with(
    names: str,
    options: Sequence[Any],
    variants: bool = False,
    few: Sequence[Any] = (),
) -> pytest.MarkDecorator:
    """Every plain model with every option, and each hybrid with one of them, by turns.

    names: of the option's arguments; variants: include the variants of hybrids
    few: the options that hybrids take turns with; all by default
    """
    found = [(name, option) for name in PLAIN for option in options]
    hybrids = (*HYBRIDS, *VARIANTS) if variants or EVERY else HYBRIDS
    few = options if EVERY else few or options
    for turn, name in enumerate(hybrids):
        chosen = few if EVERY else [few[turn % len(few)]]
        found += [(name, option) for option in chosen]
    if "," not in names:
        return pytest.mark.parametrize(("name", names), found)
    return pytest.mark.parametrize(
        ("name", *names.split(", ")), [(name, *option) for name, option in found]
    )


every_model = pytest.mark.parametrize("name", ARCHITECTURES if EVERY else (*PLAIN, *HYBRIDS))
