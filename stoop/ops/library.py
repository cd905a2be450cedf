"""Registration of our operations with torch.

A registered operation is one call to whoever watches the dispatcher: the tape records it whole,
with the arguments that it declares to write, and what it does inside runs anew in every replay.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("stoop", "DEF")


def register(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the operation `torch.ops.stoop.<name>`; returns the dispatching call.

    schema: as in native_functions.yaml, for example "store(Tensor x, Tensor(a!) out) -> ()"
    """

    # What a capture allocates must not depend on running the operation.
    assert schema.endswith("-> ()"), f"{schema}: write into given tensors, return nothing"

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.split("(", 1)[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        operation: Callable[..., Any] = getattr(torch.ops.stoop, name).default
        return operation

    return decorate
