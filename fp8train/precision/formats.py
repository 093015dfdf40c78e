"""The eight-bit floating-point formats and the cast to them.

A cast multiplies in FP32, rounds to nearest even and saturates: ±Inf goes to ±max, NaN stays NaN.
Two forms give the same values: `cast` returns bytes (a torch float8 tensor), `round_to_grid`
returns the values that those bytes stand for, still in FP32. Every value of either format is
exact in BF16, so emulation never has to decode bytes.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0; Micikevicius et al. 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A floating-point format: `max` is its largest finite value, 2^`min_exponent` its smallest
    normal one, 2^(`min_exponent` − `mantissa_bits`) its smallest subnormal one."""

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float
    dtype: torch.dtype


E4M3 = Format("E4M3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Format("E5M2", 2, -14, 57344.0, torch.float8_e5m2)


def cast(x: Tensor, fmt: Format) -> Tensor:
    """Saturating cast of a float tensor of any shape to the format's own dtype.

    torch saturates E4M3 but not E5M2 (61440 → inf), and versions before 2.12 turn E4M3 overflow
    into NaN, so the clamp comes first, always. It lets NaN through.
    """
    return x.float().clamp(-fmt.max, fmt.max).to(fmt.dtype)


def round_to_grid(x: Tensor, fmt: Format) -> Tensor:
    """The values of `cast(x, fmt)` in FP32, from FP32 arithmetic alone.

    Adding 1.5·2^(e + 23 − m) to a value of exponent e leaves FP32 with exactly m mantissa bits
    of it, rounded to nearest even; subtracting gives the rounded value back, exactly. Below the
    smallest normal value the exponent stays at it, which makes the subnormal grid.
    """
    clamped = x.float().clamp(-fmt.max, fmt.max)
    exponent = (clamped.view(torch.int32) >> 23) & 0xFF
    exponent = exponent.clamp(min=fmt.min_exponent + 127) + (23 - fmt.mantissa_bits)
    magic = ((exponent << 23) | 0x400000).view(torch.float32)
    return torch.copysign((clamped + magic) - magic, clamped)
