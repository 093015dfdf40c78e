"""The quantised linear layer: three GEMMs whose operands go through a recipe.

The gradient is straight-through: quantisation counts as the identity, and dgrad and wgrad are
GEMMs over quantised operands of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8train.precision.backends.emulated import Emulated
from fp8train.precision.quantizers import Operand, Quantizer


class QuantizedMatmul(torch.autograd.Function):
    """y = x · wᵀ for x [..., K], w [N, K]; the leading sizes of x count as rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        quantizer: Quantizer,
        gemms: Emulated,
        training: bool,
        differentiable: bool,
    ) -> Tensor:
        needs_dx, needs_dw = (needs and differentiable for needs in ctx.needs_input_grad[:2])
        dtype = gemms.compute_dtype
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        x_row, x_col = quantizer(rows, "input", dtype, training=training, columnwise=needs_dw)
        w_row, w_col = quantizer(weight, "weight", dtype, training=training, columnwise=needs_dx)
        saved = [x_col if needs_dw else None, w_col if needs_dx else None]
        ctx.save_for_backward(*(tensor for op in saved for tensor in _tensors(op)))
        ctx.quantizer, ctx.gemms, ctx.training = quantizer, gemms, training
        ctx.dtypes, ctx.shape = (x.dtype, weight.dtype), x.shape
        y = gemms.gemm(x_row, w_row, x.dtype, transpose_b=True)
        # Not a view to autograd, as in nn.Linear: FSDP2 warns of modules that return one.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        x_values, x_scale, w_values, w_scale = ctx.saved_tensors
        g_row, g_col = ctx.quantizer(
            grad_output.reshape(-1, grad_output.shape[-1]).contiguous(),
            "grad_output",
            ctx.gemms.compute_dtype,
            training=ctx.training,
            columnwise=needs_dw,
        )
        dx = dw = None
        if needs_dx:
            dx = ctx.gemms.gemm(g_row, Operand(w_values, w_scale), ctx.dtypes[0]).view(ctx.shape)
        if needs_dw:
            dw = ctx.gemms.gemm(g_col, Operand(x_values, x_scale), ctx.dtypes[1], transpose_a=True)
        return dx, dw, None, None, None, None


def _tensors(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    return (operand.values, operand.scale_inv) if operand else (None, None)


class QuantizedLinear(nn.Linear):
    """A linear layer that takes the place of an `nn.Linear` and shares its parameters."""

    quantizer: Quantizer
    gemms: Emulated

    @classmethod
    def take_over(cls, linear: nn.Linear, quantizer: Quantizer, gemms: Emulated) -> QuantizedLinear:
        """A quantised layer over the same parameters."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.quantizer, layer.gemms = quantizer, gemms
        layer.train(linear.training)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] → [..., N] in x's dtype."""
        # Inside a Function's forward gradients are always off, so it is asked here.
        differentiable = torch.is_grad_enabled()
        y = QuantizedMatmul.apply(
            x, self.weight, self.quantizer, self.gemms, self.training, differentiable
        )
        return y if self.bias is None else y + self.bias
