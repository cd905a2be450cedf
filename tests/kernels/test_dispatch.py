"""Operations and their twins: every kernel belongs to an operation, with the same signature."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stoop.ops
import stoop.ops.kernels
from stoop.ops import dispatch
from stoop.ops.dispatch import OPS, Op, op

for _, name, _ in pkgutil.iter_modules(stoop.ops.__path__):
    importlib.import_module(f"stoop.ops.{name}")

# Modules without twins: products choose by shape as well (ops/linear.py), attention is reached
# through its backend, and the rest is shared by kernels.
OTHERS = {
    "attention",
    "attention_parts",
    "choice",
    "delta_chunk",
    "delta_step",
    "fp8",
    "gated",
    "launch",
    "linear",
    "linear_choice",
    "linear_tuning",
    "mamba_parts",
    "mamba_scan",
}
MODULES = {name for _, name, _ in pkgutil.iter_modules(stoop.ops.kernels.__path__)} - OTHERS


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


@pytest.mark.parametrize("name", sorted(OPS))
def test_twins_have_one_signature(name: str) -> None:
    """Names, order, kinds and defaults."""
    twins = OPS[name]
    assert callable(twins.kernel)
    assert parameters(twins.kernel) == parameters(twins.reference)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_entry_point_of_a_kernel_belongs_to_an_operation(module: str) -> None:
    """A public function is an operation's kernel, or serves other kernel modules."""
    served = {each.name for each in OPS.values() if each.kernel_module == module}
    assert served, f"{module} has no operation"
    code = importlib.import_module(f"stoop.ops.kernels.{module}")
    folder = Path(code.__file__ or "").parent
    others = [path.read_text() for path in folder.glob("*.py") if path.stem != module]
    for name, value in vars(code).items():
        public = inspect.isfunction(value) and not name.startswith("_")
        if public and value.__module__ == code.__name__ and name not in served:
            shared = any(re.search(rf"\b{name}\b", text) for text in others)
            assert shared, f"{module}.{name} is reached by no operation"


def test_operations_are_where_their_names_say() -> None:
    for name, each in OPS.items():
        module, _, function = name.partition(".")
        assert getattr(importlib.import_module(f"stoop.ops.{module}"), function) is each
    assert len(OPS) >= 25


# ---- the choice ----


@dataclasses.dataclass
class Group:
    x: Tensor


def twins(monkeypatch: pytest.MonkeyPatch, decided_by: str) -> Op[..., str]:
    """An operation that says which of its twins ran. Its kernels serve float32."""

    @op(decided_by)
    def both(x: Any, other: Any = None) -> str:
        return "reference"

    OPS.popitem()
    both.__dict__["kernel"] = lambda x, other=None: "kernel"
    served = lambda tensor: tensor.dtype == torch.float32  # noqa: E731
    monkeypatch.setattr(dispatch, "uses_kernels", served)
    return both


@pytest.mark.parametrize(
    ("decided_by", "wrap"),
    [("x", lambda x: x), ("x.x", Group), ("x.0", lambda x: (x, x.double()))],
    ids=["tensor", "dataclass", "sequence"],
)
def test_the_named_tensor_decides(
    decided_by: str, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = twins(monkeypatch, decided_by)
    narrow, wide = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    assert both(wrap(narrow), wide) == "kernel" and both(wrap(wide), narrow) == "reference"
    assert both(x=wrap(narrow)) == "kernel" and both(other=narrow, x=wrap(wide)) == "reference"
    assert both.reference(wrap(narrow)) == "reference"


def test_a_missing_argument_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    both = twins(monkeypatch, "x")
    with pytest.raises(TypeError, match="'x'"):
        both(other=torch.zeros(1))


def test_a_parameter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="y"):

        @op("y")
        def wrong(x: Tensor) -> None:
            pass
