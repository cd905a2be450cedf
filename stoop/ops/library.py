"""Registration of our operations with torch.

torch's dispatcher sees a registered operation as one call. The tape records that call, with the
arguments that it declares to write, and each replay runs its inside again. A raw Triton launch
would be invisible to the tape.

The choice between a reference and a kernel is made before that, in `dispatch.py`. Every kernel
registers its launch here. So do references whose inside must run again as a whole (`store_kv`,
attention).
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
