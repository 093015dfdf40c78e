"""A quantized tensor: values on the format's grid, and the scales that bring them back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8train.precision.formats import Format


@dataclass
class QuantizedTensor:
    """payload · scale_inv stands for the original matrix.

    Attributes:
        payload: [rows, columns], values of the format held in BF16 or FP32, where they are exact.
        scale_inv: FP32. Per tensor: a scalar. Per block: [⌈rows/r⌉, ⌈columns/c⌉].
        fmt: the format of the payload.
        block: (r, c), the shape that shares a scale; None for the whole tensor.
    """

    payload: Tensor
    scale_inv: Tensor
    fmt: Format
    block: tuple[int, int] | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values it stands for, [rows, columns]: one product in FP32, rounded to dtype."""
        return (self.payload.float() * self.expanded_scale_inv()).to(dtype)

    def expanded_scale_inv(self) -> Tensor:
        """scale_inv in a shape that multiplies the payload."""
        if self.block is None:
            return self.scale_inv
        rows, columns = self.payload.shape
        return spread(self.scale_inv, self.block, rows, columns)


def spread(per_block: Tensor, block: tuple[int, int], rows: int, columns: int) -> Tensor:
    """One value a block, [⌈rows/r⌉, ⌈columns/c⌉] → one an element, [rows, columns]."""
    tall = per_block.repeat_interleave(block[0], 0)[:rows]
    return tall.repeat_interleave(block[1], 1)[:, :columns]
