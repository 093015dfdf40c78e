"""Quantise a matrix: one scale for all of it, or one a block.

Each function has a plain torch form, which defines the result on any device, and takes the CPU
kernels where they apply. Both give the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8train.precision import scaling
from fp8train.precision.backends import cpu_kernels
from fp8train.precision.formats import Format, round_to_grid
from fp8train.precision.tensor import QuantizedTensor, spread


def tensor_amax(x: Tensor) -> Tensor:
    """max |x| as an FP32 scalar tensor on x's device; NaN does not enter, Inf does."""
    if cpu_kernels.usable(x):
        return torch.tensor(cpu_kernels.amax(x))
    return scaling.amax(x)


def quantize_tensor(x: Tensor, scale: Tensor, fmt: Format, dtype: torch.dtype) -> QuantizedTensor:
    """Cast x · scale to the format, one scale for the whole tensor.

    Args:
        x: BF16 or FP32, any shape.
        scale: FP32 scalar tensor.
        dtype: of the payload, BF16 or FP32; both hold the format's values exactly.
    """
    if cpu_kernels.usable(x):
        payload = cpu_kernels.quantize(x, scale.item(), fmt, dtype)
    else:
        payload = round_to_grid(x.float() * scale, fmt).to(dtype)
    return QuantizedTensor(payload, scale.reciprocal(), fmt)


def quantize_blocks(
    x: Tensor,
    fmt: Format,
    block: tuple[int, int],
    dtype: torch.dtype,
    *,
    margin: int = 0,
    power_of_two: bool = True,
    dequantize: bool = False,
) -> QuantizedTensor:
    """Quantise x with one scale a block, from the block's own amax (DeepSeek-V3).

    Args:
        x: BF16 or FP32 [rows, columns]; sizes need not be multiples of the block, the last one
            is then smaller, as if padded with zeros.
        block: (rows, columns) that share a scale: (1, 128), (128, 1) or (128, 128).
        dtype: of the payload, BF16 or FP32.
        dequantize: the payload comes multiplied by scale_inv, ready for a plain GEMM. With
            power-of-two scales that is exact in FP32 and, for values of at least 2^-126, in BF16.
    """
    overflow = torch.finfo(x.dtype).max
    if cpu_kernels.usable(x):
        payload, scale_inv = cpu_kernels.quantize_blocks(
            x,
            fmt,
            block,
            dtype,
            numerator=fmt.max * 2.0**-margin,
            overflow=overflow,
            power_of_two=power_of_two,
            dequantize=dequantize,
        )
        return QuantizedTensor(payload, scale_inv, fmt, block)
    rows, columns = x.shape
    padded = F.pad(x, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.view(-(-rows // block[0]), block[0], -(-columns // block[1]), block[1])
    scale = scaling.scale_from_amax(
        scaling.amax(tiles, dim=(1, 3)),
        fmt.max,
        margin=margin,
        power_of_two=power_of_two,
        overflow=overflow,
    )
    scale_inv = scale.reciprocal()
    payload = round_to_grid(x.float() * spread(scale, block, rows, columns), fmt)
    if dequantize:
        payload = payload * spread(scale_inv, block, rows, columns)
    return QuantizedTensor(payload.to(dtype), scale_inv, fmt, block)
