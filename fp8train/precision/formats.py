"""The floating-point formats, the cast to them and back.

A cast multiplies in FP32, rounds to nearest even and saturates: ±Inf goes to ±max, NaN stays NaN.
Two forms give the same values: `cast` returns bytes, `round_to_grid` returns the values that
those bytes stand for, still in FP32. Every value of every format is exact in BF16, so emulation
never has to decode bytes.

Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; Micikevicius et al. 2022; for E2M1 and
E8M0 the OCP Microscaling Formats (MX) Specification 1.0; for FNUZ Noune et al. 2022, as AMD's
MI300 has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A floating-point format: `max` is its largest finite value, 2^`min_exponent` its smallest
    normal one. `dtype` is torch's type of one element, None where a byte holds two of them;
    without `signed_zero` −0 is +0."""

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float
    dtype: torch.dtype | None
    bits: int = 8
    signed_zero: bool = True

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


E4M3 = Format("E4M3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Format("E5M2", 2, -14, 57344.0, torch.float8_e5m2)
E4M3FNUZ = Format("E4M3FNUZ", 3, -7, 240.0, torch.float8_e4m3fnuz, signed_zero=False)
E5M2FNUZ = Format("E5M2FNUZ", 2, -15, 57344.0, torch.float8_e5m2fnuz, signed_zero=False)
E2M1 = Format("E2M1", 1, 0, 6.0, None, bits=4)

BY_NAME = {fmt.name.lower(): fmt for fmt in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M1)}

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 is the sign
E8M0_NAN = 255


def cast(x: Tensor, fmt: Format) -> Tensor:
    """Saturating cast of a float tensor [..., n] to what the format is stored as.

    torch saturates E4M3 but not E5M2 (61440 → inf), and versions before 2.12 turn E4M3 overflow
    into NaN, so the clamp comes first, always. It lets NaN through.

    Returns:
        [..., n] of fmt.dtype; of E2M1 uint8 [..., n/2], two codes a byte, the first one in the low
        bits (as torch.float4_e2m1fn_x2). E2M1 has no NaN: it becomes 6, as the GPU's
        cvt.rn.satfinite.e2m1x2 makes it.
    Raises:
        ValueError: the last dimension of a tensor for E2M1 is odd.
    """
    if fmt.dtype is not None:
        return x.float().clamp(-fmt.max, fmt.max).to(fmt.dtype)
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"{fmt.name} stores two values a byte: the last dimension of shape {tuple(x.shape)} "
            "must be even"
        )
    grid = round_to_grid(x, fmt).nan_to_num(nan=fmt.max).contiguous()
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=x.device)
    codes = torch.bucketize(grid.abs(), magnitudes, out_int32=True) | grid.signbit().int() << 3
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def decode(stored: Tensor, fmt: Format) -> Tensor:
    """The FP32 values of what `cast` returned, or of the same bytes as uint8."""
    if fmt.dtype is not None:
        return stored.view(fmt.dtype).float()
    stored = stored.view(torch.uint8)
    codes = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(-2)
    values = (*E2M1_MAGNITUDES, *(-magnitude for magnitude in E2M1_MAGNITUDES))
    return torch.tensor(values, device=stored.device)[codes.int()]


def round_to_grid(x: Tensor, fmt: Format, noise: Tensor | None = None) -> Tensor:
    """The values of `cast(x, fmt)` in FP32, from FP32 arithmetic alone; NaN stays NaN.

    Adding 1.5·2^(e + 23 − m) to a value of exponent e leaves FP32 with exactly m mantissa bits
    of it, rounded to nearest even; subtracting gives the rounded value back, exactly. Below the
    smallest normal value the exponent stays at it, which makes the subnormal grid.

    With noise, integers uniform in [0, 2^24) of x's shape (`philox.draws`), it rounds
    stochastically instead: with y = clamp(x), q = 2^(max(e, min_exponent) − m) and t = |y|/q, the
    magnitude is (⌊t⌋ + (2·noise + 1 < ⌈(t − ⌊t⌋)·2^25⌉))·q. Each operation is exact in FP32 or
    int32, so that any machine gets these bits. Values of the grid stay; the mean is y within
    2^-25·q.
    """
    clamped = x.float().clamp(-fmt.max, fmt.max)
    exponent = ((clamped.view(torch.int32) >> 23) & 0xFF).clamp(min=fmt.min_exponent + 127)
    if noise is None:
        magic = (exponent + (23 - fmt.mantissa_bits) << 23 | 0x400000).view(torch.float32)
        rounded = (clamped + magic) - magic
    else:
        quantum = (exponent - fmt.mantissa_bits << 23).view(torch.float32)
        per_quantum = (254 + fmt.mantissa_bits - exponent << 23).view(torch.float32)
        t = clamped.abs() * per_quantum
        threshold = ((t - t.floor()) * 2**25).ceil().to(torch.int32)  # of NaN: any, NaN it stays
        rounded = (t.floor() + (2 * noise + 1 < threshold)) * quantum
    rounded = rounded.copysign(clamped)
    return rounded if fmt.signed_zero else torch.where(rounded == 0, 0.0, rounded)


def e8m0_encode(scale: Tensor) -> Tensor:
    """FP32 2^k, −127 ≤ k ≤ 127, or NaN → its E8M0 byte k + 127, or 255 (uint8, same shape).

    Other values are the caller's mistake and not looked for: their mantissa is dropped, Inf
    becomes NaN, 0 becomes 2^-127.
    """
    return (scale.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


def e8m0_decode(stored: Tensor) -> Tensor:
    """uint8 → FP32 2^(byte − 127), same shape; byte 255 is NaN, byte 0 the subnormal 2^-127."""
    bits = stored.to(torch.int32)
    scale = torch.where(bits == 0, 0x00400000, bits << 23).view(torch.float32)
    return torch.where(bits == E8M0_NAN, torch.nan, scale)
