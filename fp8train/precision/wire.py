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

from fp8train.precision.formats import E5M2, Format, cast, decode, e8m0_decode, e8m0_encode
from fp8train.precision.scaling import scale_from_amax


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
    """The values themselves, rounded to dtype (FP32, BF16 or FP16).

    FP16's range is narrow: from 65520 on a value becomes Inf, so that the step is skipped and the
    loss scale backs off, and below 2^-25 it becomes 0, which a loss scale is there to prevent.
    """

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
        scale_inv = torch.where(amax.isfinite(), 1 / scale, torch.nan)
        return torch.cat((payload, e8m0_encode(scale_inv).view(rows, -1)), dim=1)

    def decode(self, message: Tensor, size: int) -> Tensor:
        count = -(-size // self.block)
        payload, scale_inv = message.split((count * self.block, count))
        values = decode(payload, self.fmt).view(count, self.block)
        return (values * e8m0_decode(scale_inv)[:, None]).view(-1)[:size]


CODECS: dict[str, Codec] = {
    "fp32": Plain("fp32", torch.float32),
    "bf16": Plain("bf16", torch.bfloat16),
    "fp16": Plain("fp16", torch.float16),
    "e5m2": BlockScaled(),
}
