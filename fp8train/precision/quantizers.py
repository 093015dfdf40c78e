"""One layer's quantisers: a recipe applied to its input, weight and output gradient.

Each call gives two matrices: `rowwise`, scaled for a GEMM that reduces over the columns, and
`columnwise`, for one that reduces over the rows. With one scale a tensor they are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fp8train.precision.delayed import DelayedState
from fp8train.precision.quantize import quantize_blocks, quantize_tensor, tensor_amax
from fp8train.precision.recipes import ROLES, BlockScaling, CurrentScaling
from fp8train.precision.scaling import scale_from_amax


@dataclass
class Operand:
    """One side of a GEMM: values [rows, columns], and the scale its product still lacks."""

    values: Tensor
    scale_inv: Tensor | None = None


class Quantizer(Protocol):
    """Turns one tensor of a layer into operands.

    Args:
        x: BF16 or FP32 [rows, columns].
        role: "input", "weight" or "grad_output".
        dtype: of the operands' values.
        training: whether this call may leave a trace, such as an amax.
        columnwise: whether the second operand is needed.
    Returns:
        (rowwise, columnwise); columnwise is None if not needed.
    """

    def __call__(
        self, x: Tensor, role: str, dtype: torch.dtype, *, training: bool, columnwise: bool
    ) -> tuple[Operand, Operand | None]: ...


@dataclass
class HighPrecision:
    """No quantisation: the values as they are, for GEMMs in BF16."""

    def __call__(
        self, x: Tensor, role: str, dtype: torch.dtype, *, training: bool, columnwise: bool
    ) -> tuple[Operand, Operand | None]:
        operand = Operand(x.to(dtype))
        return operand, operand


@dataclass
class Current:
    recipe: CurrentScaling

    def __call__(
        self, x: Tensor, role: str, dtype: torch.dtype, *, training: bool, columnwise: bool
    ) -> tuple[Operand, Operand | None]:
        fmt = self.recipe.formats.of(role)
        scale = scale_from_amax(
            tensor_amax(x),
            fmt.max,
            margin=self.recipe.margin,
            power_of_two=self.recipe.power_of_two,
        )
        quantized = quantize_tensor(x, scale, fmt, dtype)
        operand = Operand(quantized.payload, quantized.scale_inv)
        return operand, operand


@dataclass
class Delayed:
    """Scales of earlier steps; `first_row` is the layer's first row of the shared state."""

    state: DelayedState
    first_row: int

    def __call__(
        self, x: Tensor, role: str, dtype: torch.dtype, *, training: bool, columnwise: bool
    ) -> tuple[Operand, Operand | None]:
        row = self.first_row + ROLES.index(role)
        if training:
            self.state.stage(row, tensor_amax(x))
        scale = self.state.scale[row].clone()  # the state changes before backward reads it
        quantized = quantize_tensor(x, scale, self.state.recipe.formats.of(role), dtype)
        operand = Operand(quantized.payload, quantized.scale_inv)
        return operand, operand


@dataclass
class Block:
    recipe: BlockScaling

    def __call__(
        self, x: Tensor, role: str, dtype: torch.dtype, *, training: bool, columnwise: bool
    ) -> tuple[Operand, Operand | None]:
        size = self.recipe.size
        if role == "weight":  # square blocks: the transpose of the one is the other
            operand = self._operand(x, role, (size, size), dtype)
            return operand, operand
        rowwise = self._operand(x, role, (1, size), dtype)
        # The second copy is quantised again from high precision, not transposed from the first.
        return rowwise, self._operand(x, role, (size, 1), dtype) if columnwise else None

    def _operand(self, x: Tensor, role: str, block: tuple[int, int], dtype: torch.dtype) -> Operand:
        quantized = quantize_blocks(
            x,
            self.recipe.formats.of(role),
            block,
            dtype,
            margin=self.recipe.margin,
            dequantize=True,
        )
        return Operand(quantized.payload)
