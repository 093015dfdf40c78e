"""From an amax to a scale: the formulas of Transformer Engine.

`scale` multiplies a value before the cast; `scale_inv = 1 / scale` is stored and multiplies it
back. All in FP32 with IEEE division.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8train.precision.formats import e8m0_decode

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = torch.finfo(torch.float32).tiny  # a margin can't push a scale below: 0 has no inverse


def amax(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """max |x| in FP32 over `dim` (all if None); NaN does not enter, Inf does; 0 if empty."""
    magnitude = x.abs().float()
    magnitude = torch.where(magnitude.isnan(), 0.0, magnitude)
    if magnitude.numel() == 0:
        return magnitude.sum(dim=dim)  # zeros of the reduced shape
    return magnitude.amax(dim=() if dim is None else dim)


@dataclass(frozen=True)
class ScaleRule:
    """How an amax becomes a scale.

    Attributes:
        kind: "fp32", "power_of_two" (the FP32 scale rounded down to one), or "e8m0" (MX: the
            inverse rounded up to one).
        margin: the amax is brought to max·2^-margin.
    """

    kind: str = "fp32"
    margin: int = 0

    @property
    def power_of_two(self) -> bool:
        return self.kind != "fp32"

    def scales(self, amax: Tensor, max_value: float, overflow: float = FLT_MAX) -> Scales:
        """(scale, scale_inv) of FP32 amaxes of any shape; see `scale_from_amax` and
        `e8m0_exponent`."""
        if self.kind == "e8m0":
            exponent = e8m0_exponent(amax * 2.0**self.margin, max_value)
            return Scales(*(e8m0_decode(e.to(torch.uint8)) for e in (254 - exponent, exponent)))
        scale = scale_from_amax(
            amax,
            max_value,
            margin=self.margin,
            power_of_two=self.power_of_two,
            overflow=overflow,
        )
        return Scales(scale, scale.reciprocal())


class Scales(NamedTuple):
    """FP32 tensors of one shape."""

    scale: Tensor
    scale_inv: Tensor


def scale_from_amax(
    amax: Tensor,
    max_value: float,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    overflow: float = FLT_MAX,
) -> Tensor:
    """Scale that brings each amax to max_value·2^-margin: current and block scaling.

    An amax of 0, Inf or NaN gives 1; a scale that overflows gives `overflow`; `power_of_two`
    rounds the scale down to one. Source: TE `common/recipe/recipe_common.cuh`,
    `compute_scale_from_amax`.

    Args:
        amax: FP32 tensor of any shape.
        max_value: largest finite value of the format.
        overflow: FLT_MAX; in block scaling the largest finite value of the input's type.
    Returns:
        FP32 tensor of amax's shape.
    """
    scale = divide(max_value * 2.0**-margin, amax)
    scale = torch.where(scale.isinf(), overflow, scale).clamp(min=FLT_MIN)
    if power_of_two:
        scale = floor_to_power_of_two(scale)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)


def e8m0_exponent(amax: Tensor, max_value: float) -> Tensor:
    """MX's shared exponent E of each amax, biased by 127, int32 in [0, 254]: 2^(E − 127) is the
    smallest power of two that brings the amax to at most max_value.

    amax · fp32(1 / max_value), rounded up to a power of two; 0 gives 0 and Inf 254 (NaN would give
    255, but no amax is NaN). Rounding down, as the OCP specification suggests, would saturate.
    Source: TE `common/util/ptx.cuh`,
    `float_to_e8m0`.
    """
    inverse = torch.tensor(1.0, device=amax.device) / torch.tensor(max_value, device=amax.device)
    bits = (amax * inverse).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below 2^-126 only a mantissa above 2^-127's goes up; at the top there is nothing above.
    up = (mantissa > 0) & (exponent < 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    return (exponent + up.int()).clamp(max=254)


def divide(numerator: float | Tensor, amax: Tensor) -> Tensor:
    """FP32 division rounded once. torch computes number / tensor as number · (1 / tensor)."""
    return torch.as_tensor(numerator, dtype=torch.float32, device=amax.device) / amax


def floor_to_power_of_two(scale: Tensor) -> Tensor:
    """Clear the mantissa of a positive normal FP32 tensor."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def delayed_scale(
    amax: Tensor,
    previous: Tensor,
    max_value: float | Tensor,
    *,
    margin: int = 0,
    power_of_two: bool = False,
) -> Tensor:
    """Scale of delayed scaling: an amax that is 0 or not finite keeps the previous scale.

    A scale that overflows gives FLT_MAX. Source: TE `common/recipe/delayed_scaling.cu`.
    """
    scale = divide(max_value * 2.0**-margin, amax).clamp(FLT_MIN, FLT_MAX)
    if power_of_two:
        scale = floor_to_power_of_two(scale)
    return torch.where((amax > 0) & amax.isfinite(), scale, previous)
