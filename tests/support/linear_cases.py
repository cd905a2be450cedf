"""GEMMs over few tokens with norm, gate and residual, and their results in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EPS = 1e-5
KINDS = ("linear", "add", "norm", "gated", "gated alone")


@dataclass(frozen=True)
class Case:
    """One GEMM and its operands."""

    kind: str
    x: Tensor  # [tokens, inputs]
    weight: Tensor  # [rows, inputs]
    bias: Tensor | None  # [rows]
    norm: Tensor  # [inputs]
    residual: Tensor  # [tokens, outputs]

    @property
    def arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {"bias": self.bias, "gated": self.kind.startswith("gated")}
        if self.kind in ("norm", "gated"):
            given["norm"] = (self.norm, EPS)
        if self.kind == "add":
            given["residual"] = self.residual
        return given

    def run(self, tiling: Any, dtype: torch.dtype | None = None) -> Tensor:
        from stoop.ops.kernels import linear as kernels

        out = torch.full_like(self.residual, torch.nan, dtype=dtype or self.x.dtype)
        kernels.launch(self.x, self.weight, out, tiling, **self.arguments)
        return out

    def exact(self) -> Tensor:
        x = self.x.double()
        if self.kind in ("norm", "gated"):
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * self.norm.double()
        out = x @ self.weight.double().t()
        if self.bias is not None:
            out = out + self.bias.double()
        if self.kind.startswith("gated"):
            gate, up = out.chunk(2, dim=1)
            return torch.nn.functional.silu(gate) * up
        return out + self.residual.double() if self.kind == "add" else out


def make_case(
    kind: str,
    tokens: int,
    size: tuple[int, int],
    dtype: torch.dtype,
    *,
    bias: bool = False,
    device: str = "cpu",
) -> Case:
    rows, inputs = size

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, device=device)).to(dtype)

    return Case(
        kind,
        draw(tokens, inputs, scale=3.0),
        draw(rows, inputs, scale=inputs**-0.5),
        draw(rows) if bias else None,
        draw(inputs, scale=0.3) + 1,
        draw(tokens, rows // 2 if kind.startswith("gated") else rows),
    )


def assert_right(out: Tensor, exact: Tensor, limit: float) -> None:
    error = (out.double() - exact).norm() / exact.norm()
    assert error < limit, error.item()


def limit_of(dtype: torch.dtype) -> float:
    # Triton's interpreter truncates where a GPU rounds.
    return 2e-2 if dtype == torch.bfloat16 else 2e-3
