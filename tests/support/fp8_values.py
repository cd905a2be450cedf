"""fp8 by brute force: which values are hard to round, and to what each is rounded."""

import torch
from torch import Tensor

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
NAN = 0x7F


def decode(codes: Tensor) -> Tensor:
    """The value of each byte, in float64, by the definition of e4m3."""
    bits = codes.to(torch.int64)
    exponent, mantissa = bits >> 3 & 0xF, (bits & 7).double()
    value = torch.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * torch.exp2(exponent.double() - 10)
    )
    value = value.masked_fill(bits & 0x7F == NAN, torch.nan)
    return torch.where(bits >= 0x80, -value, value)


def values_to_round() -> Tensor:
    """All values of fp8, the ties between them, their neighbours in float32, what is too large or
    too small, infinities and NaN: float32."""
    exact = decode(BYTES[:NAN])  # rising
    ties = (exact[1:] + exact[:-1]) / 2
    points = torch.cat((exact, ties)).float()
    around = [torch.nextafter(points, torch.full_like(points, to)) for to in (-1e9, 1e9)]
    extremes = [464, 464.01, 479, 480, 512, 1e4, 3e38, torch.inf, 1e-30, 1e-45, torch.nan]
    generator = torch.Generator().manual_seed(0)
    others = 20 * torch.randn(500, generator=generator)
    found = torch.cat((points, *around, torch.tensor(extremes), others))
    return torch.cat((found, -found))


def nearest_fp8(values: Tensor) -> Tensor:
    """The byte whose value is nearest, with an even mantissa where two are."""
    table = decode(BYTES[:NAN])
    distance = (values.double().abs().clamp(max=448)[:, None] - table).abs()
    best = distance.min(1, keepdim=True).values
    candidates = distance == best
    even = candidates & (BYTES[:NAN] % 2 == 0)
    chosen = torch.where(even.any(1), even.int().argmax(1), candidates.int().argmax(1))
    chosen = torch.where(values.isnan(), NAN, chosen)
    return (chosen + 0x80 * values.signbit()).to(torch.uint8)
