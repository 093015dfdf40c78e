"""Tensors as bytes for the wire: what the gradient collectives send.

An E5M2 message is one byte an element and one E8M0 byte a block of 128 for its scale, a power of
two: 1.0078 bytes an element. NaN and Inf are seen before a scale is formed: a block that holds
one gets E8M0's NaN, so the receiver's sum is NaN and the step is skipped, never silently clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8train.precision.formats import E5M2, Format, cast
from fp8train.precision.scaling import scale_from_amax

E8M0_NAN = 255


class Codec(Protocol):
    """A way to write FP32 values as bytes."""

    @property
    def name(self) -> str: ...

    def encode(self, x: Tensor) -> Tensor:
        """FP32 [N, S] → uint8 [N, W], one message a row."""
        ...

    def decode(self, message: Tensor, size: int) -> Tensor:
        """uint8 [W] → FP32 [S], for S = size."""
        ...


@dataclass(frozen=True)
class Plain:
    """The values themselves, rounded to dtype (FP32 or BF16)."""

    name: str
    dtype: torch.dtype

    def encode(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, message: Tensor, size: int) -> Tensor:
        return message.view(self.dtype).float()


@dataclass(frozen=True)
class BlockScaled:
    """Eight-bit values with a power-of-two scale a block, from the block's amax."""

    name: str = "e5m2"
    fmt: Format = E5M2
    block: int = 128

    def encode(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        blocks = F.pad(x, (0, -x.shape[1] % self.block)).view(rows, -1, self.block)
        amax = blocks.abs().amax(dim=-1, keepdim=True)  # NaN and Inf both come through
        scale = scale_from_amax(amax, self.fmt.max, power_of_two=True)
        payload = cast(blocks * scale, self.fmt).view(torch.uint8).view(rows, -1)
        exponents = torch.where(amax.isfinite(), 254 - exponent_bits(scale), E8M0_NAN)
        return torch.cat((payload, exponents.view(rows, -1).to(torch.uint8)), dim=1)

    def decode(self, message: Tensor, size: int) -> Tensor:
        count = -(-size // self.block)
        payload, exponents = message.split((count * self.block, count))
        values = payload.view(self.fmt.dtype).float().view(count, self.block)
        return (values * from_e8m0(exponents)[:, None]).view(-1)[:size]


def exponent_bits(scale: Tensor) -> Tensor:
    """Biased exponent of a positive normal FP32 tensor, int32."""
    return scale.view(torch.int32) >> 23


def from_e8m0(exponents: Tensor) -> Tensor:
    """2^(byte − 127) in FP32; byte 255 is NaN, byte 0 the subnormal 2^-127."""
    bits = exponents.to(torch.int32)
    value = torch.where(bits == 0, 0x00400000, bits << 23).view(torch.float32)
    return torch.where(bits == E8M0_NAN, torch.nan, value)


CODECS: dict[str, Codec] = {
    "fp32": Plain("fp32", torch.float32),
    "bf16": Plain("bf16", torch.bfloat16),
    "e5m2": BlockScaled(),
}
