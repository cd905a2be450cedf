"""Which models a parity test runs with which of its options."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from support.checkpoints import ARCHITECTURES, HYBRIDS, PLAIN, RECURRENT, VARIANTS

EVERY = bool(os.environ.get("STOOP_TEST_ALL"))


def caching_prefixes(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options under which models with recurrent layers cache prefixes, too, unless those turn it
    off: on a CPU they must be asked."""
    if name not in RECURRENT or not options.get("enable_prefix_caching", True):
        return options
    return {"state_cache_memory": "4MiB", **options}


def models_with(names: str, *groups: Sequence[Any], variants: bool = False) -> pytest.MarkDecorator:
    """Every plain model with one option of each group, each hybrid with one of the last, by turns.

    names: of an option's arguments; variants: include the variants of hybrids
    `make test-all` has every model with every option.
    """
    if EVERY:
        every = [option for group in groups for option in group]
        found = [(name, option) for name in ARCHITECTURES for option in every]
    else:
        hybrids = (*HYBRIDS, *VARIANTS) if variants else HYBRIDS
        found = [(name, g[turn % len(g)]) for turn, name in enumerate(PLAIN) for g in groups]
        last = groups[-1]
        found += [(name, last[turn % len(last)]) for turn, name in enumerate(hybrids)]
    if "," not in names:
        return pytest.mark.parametrize(("name", names), found)
    return pytest.mark.parametrize(
        ("name", *names.split(", ")), [(name, *option) for name, option in found]
    )


every_model = pytest.mark.parametrize("name", ARCHITECTURES if EVERY else (*PLAIN, *HYBRIDS))
