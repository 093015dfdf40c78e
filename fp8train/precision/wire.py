"""Tensors as bytes for the wire: what the gradient collectives send.

An eight-bit message is one byte an element and, behind them, one E8M0 byte a scale, a power of two:
a scale a block of 128 costs 1.0078 bytes an element. NaN and Inf are seen before a scale is formed:
a block that holds one gets E8M0's NaN, so the receiver's sum is NaN and the step is skipped, never
silently clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8train.precision.formats import (
    E4M3,
    E5M2,
    Format,
    cast,
    decode,
    e8m0_decode,
    e8m0_encode,
    round_to_grid,
)
from fp8train.precision.kernels import triton_wire, wire_kernels
from fp8train.precision.kernels.triton_wire import BLOCK
from fp8train.precision.quantize import Draw
from fp8train.precision.scaling import scale_from_amax

NAN = 0x7F  # NaN's byte in E5M2 and in E4M3


class Codec(Protocol):
    """A way to write FP32 values as bytes."""

    @property
    def name(self) -> str: ...

    def width(self, size: int) -> int:
        """Bytes of a message of so many elements."""
        ...

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """FP32 [N, S] → uint8 [N, W], one message a row, to nearest even or, with a draw,
        stochastically."""
        ...

    def decode(self, message: Tensor, size: int) -> Tensor:
        """uint8 [W] → FP32 [S], for S = size."""
        ...

    def add(self, total: Tensor, messages: Tensor) -> None:
        """Add the values of messages, uint8 [N, W], to total, FP32 [S], in their order."""
        ...


@dataclass(frozen=True)
class Plain:
    """The values themselves, rounded to dtype (FP32, BF16 or FP16), always to nearest even.

    FP16's range is narrow: from 65520 on a value becomes Inf, so that the step is skipped and the
    loss scale backs off, and below 2^-25 it becomes 0, which a loss scale is there to prevent.
    """

    name: str
    dtype: torch.dtype

    def width(self, size: int) -> int:
        """As `Codec.width`."""
        return size * self.dtype.itemsize

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """As `Codec.encode`."""
        return x.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, message: Tensor, size: int) -> Tensor:
        """As `Codec.decode`."""
        return message.view(self.dtype).float()

    def add(self, total: Tensor, messages: Tensor) -> None:
        """As `Codec.add`."""
        for message in messages.view(self.dtype):
            total.add_(message)  # widened exactly, then one FP32 sum


@dataclass(frozen=True)
class EightBit:
    """Eight-bit values with power-of-two scales from the amaxes of what shares them.

    Attributes:
        scaling: "block", a scale for 128 elements; "tensor", one a message; "none", for the
            comparison: values below the format's smallest are lost, those above its largest become
            it.
    """

    name: str
    fmt: Format
    scaling: str = "block"

    def block(self, size: int) -> int:
        """Elements that share a scale; 0 without scales."""
        return {"block": min(BLOCK, size), "tensor": size, "none": 0}[self.scaling]

    def width(self, size: int) -> int:
        """As `Codec.width`."""
        block = self.block(size)
        return size + (-(-size // block) if block else 0)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """As `Codec.encode`."""
        size = x.shape[1]
        if size and wire_kernels.usable(x) and x.dtype == torch.float32:
            numbers = None if draw is None else draw.numbers(x)
            block = self.block(size)
            return wire_kernels.encode(x, self.width(size), block, self.fmt, numbers)
        if draw is None and self.scaling == "block" and triton_wire.usable(x):
            return triton_wire.encode(x, self.width(size), self.fmt)
        return self.encode_plainly(x, draw)

    def encode_plainly(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """`encode` in torch operators, for any device: the definition of the kernels' bits."""
        rows, size = x.shape
        if self.scaling == "none":
            return torch.where(x.isfinite(), self._payload(x, draw), NAN)
        if size == 0:
            return torch.empty(rows, 0, dtype=torch.uint8, device=x.device)
        block = self.block(size)
        amax = F.pad(x.abs(), (0, -size % block)).view(rows, -1, block).amax(dim=-1)
        finite = amax.isfinite()  # NaN and Inf both come through amax
        scale = scale_from_amax(amax, self.fmt.max, power_of_two=True)
        payload = self._payload(x * self._wide(scale, size), draw)
        payload = torch.where(self._wide(finite, size), payload, 0)
        stored = e8m0_encode(torch.where(finite, 1 / scale, torch.nan))
        return torch.cat((payload, stored), dim=1)

    def _payload(self, y: Tensor, draw: Draw | None) -> Tensor:
        """The bytes of scaled values [N, S]."""
        if draw is not None:
            y = round_to_grid(y, self.fmt, draw.noise(y))
        return cast(y, self.fmt).view(torch.uint8)

    def _wide(self, per_block: Tensor, size: int) -> Tensor:
        """One value a block [..., B] → one an element [..., S]."""
        return per_block.repeat_interleave(self.block(size), dim=-1)[..., :size]

    def decode(self, message: Tensor, size: int) -> Tensor:
        """As `Codec.decode`."""
        out = torch.empty(size, device=message.device)
        if wire_kernels.usable(out, message):
            wire_kernels.decode_into(out, message, self.block(size), self.fmt, add=False)
            return out
        return self.decode_plainly(message, size)

    def decode_plainly(self, message: Tensor, size: int) -> Tensor:
        """`decode` in torch operators."""
        values = decode(message[:size].contiguous(), self.fmt)
        if self.scaling == "none" or size == 0:
            return values
        return values * self._wide(e8m0_decode(message[size:]), size)

    def add(self, total: Tensor, messages: Tensor) -> None:
        """As `Codec.add`."""
        size = len(total)
        if self.scaling == "block" and triton_wire.usable(total, messages):
            triton_wire.add(total, messages, self.fmt)
            return
        for message in messages:
            if wire_kernels.usable(total, message):
                wire_kernels.decode_into(total, message, self.block(size), self.fmt, add=True)
            else:
                total.add_(self.decode_plainly(message, size))

    def saturated(self, messages: Tensor, x: Tensor) -> Tensor:
        """How many elements of x [N, S] are beyond the largest magnitude of their block, int64."""
        size = x.shape[1]
        largest = int(cast(torch.tensor([self.fmt.max]), self.fmt).view(torch.uint8))
        values = torch.stack([self.decode(message, size) for message in messages])
        return (((messages[:, :size] & 0x7F) == largest) & (x.abs() > values.abs())).sum()

    def flushed(self, messages: Tensor, x: Tensor) -> Tensor:
        """How many elements of x [N, S] that are not zero have become it, int64."""
        return (((messages[:, : x.shape[1]] & 0x7F) == 0) & (x != 0)).sum()


PLAIN = {
    "fp32": Plain("fp32", torch.float32),
    "bf16": Plain("bf16", torch.bfloat16),
    "fp16": Plain("fp16", torch.float16),
}
FORMATS = {"e5m2": E5M2, "e4m3": E4M3}


@cache
def codec(name: str, scaling: str = "block") -> Codec:
    """The codec of a wire format; `scaling` is for those of eight bits."""
    if name in PLAIN:
        return PLAIN[name]
    return EightBit(name, FORMATS[name], scaling)
