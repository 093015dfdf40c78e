"""The quantised linear layer: three GEMMs whose operands go through a recipe.

The gradient is straight-through: quantisation counts as the identity, and dgrad and wgrad are
GEMMs over quantised operands of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fp8train.precision.quantize import share_amax
from fp8train.precision.quantizers import Operand, Position, Quantizer
from fp8train.precision.scaling import amax, floor_to_power_of_two
from fp8train.precision.tensor import QuantizedTensor
from fp8train.precision.weight_bytes import WeightBytes


class Gemms(Protocol):
    """The three GEMMs of a linear layer on some backend."""

    def gemm(self, kind: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """fprop a · bᵀ, dgrad a · b, wgrad aᵀ · b, in dtype."""
        ...


Wgrad = Callable[[], Tensor]
Observer = Callable[[str, Tensor, Operand], None]  # role, what came in, what became of it


@dataclass
class Numerics:
    """What a layer computes with.

    Attributes:
        quantizers: one for each role.
        gemms: of the backend.
        position: of the micro batch in training, shared by the model's layers.
        observer: is shown each role's row-wise copy in training; None outside telemetry's steps.
    """

    quantizers: dict[str, Quantizer]
    gemms: Gemms
    position: Position = field(default_factory=Position)
    observer: Observer | None = None

    def quantize(
        self,
        role: str,
        x: Tensor,
        *,
        rowwise: bool,
        columnwise: bool,
        training: bool,
        position: Position,
    ) -> tuple[Operand | None, Operand | None]:
        """Operands of x, after `Quantizer`."""
        operands = self.quantizers[role](
            x, rowwise=rowwise, columnwise=columnwise, training=training, position=position
        )
        if self.observer is not None and training and operands[0] is not None:
            self.observer(role, x, operands[0])
        return operands

    def saw(self, role: str, x: Tensor, operand: Operand, *, training: bool) -> None:
        """Take note of a tensor that another layer has quantised for this one too."""
        if training:
            self.quantizers[role].note(x)
            if self.observer is not None:
                self.observer(role, x, operand)

    def quantize_weight(
        self,
        weight: Tensor,
        levels: Tensor | None,
        *,
        columnwise: bool,
        training: bool,
        position: Position,
    ) -> WeightOperands:
        """Operands of a weight for fprop and dgrad; with levels [K] fprop's columns are multiplied
        by them, against its input's. dgrad has no input, and takes the weight as it is."""
        asked: dict[str, Any] = {"training": training, "position": position}
        if levels is None:
            return self.quantize("weight", weight, rowwise=True, columnwise=columnwise, **asked)
        levelled = weight * levels.to(weight.dtype)
        row, _ = self.quantize("weight", levelled, rowwise=True, columnwise=False, **asked)
        if not columnwise:
            return row, None
        return row, self.quantize("weight", weight, rowwise=False, columnwise=True, **asked)[1]


@dataclass(frozen=True)
class ArrivingInput:
    """A layer's input that was quantised in parts, by the ranks that had them.

    Attributes:
        stand_in: [..., K]; carries shape, dtype and gradient, but no values.
        rowwise: the operand of fprop.
        part: this rank's part of wgrad's operand; None where no gradient is wanted.
        join: makes that operand of its parts.
    """

    stand_in: Tensor
    rowwise: Operand
    part: Operand | None
    join: Callable[[Operand], Operand]


class QuantizedMatmul(torch.autograd.Function):
    """y = x · wᵀ for x [..., K], w [N, K]; the leading sizes of x count as rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        numerics: Numerics,
        weight_operands: WeightOperands | None,
        levels: Tensor | None,
        training: bool,
        differentiable: bool,
        put_off: Callable[[Wgrad], None] | None,
        arriving: ArrivingInput | None,
    ) -> Tensor:
        needs_dx, needs_dw = (needs and differentiable for needs in ctx.needs_input_grad[:2])
        needs_dw |= put_off is not None
        position = replace(numerics.position)  # as it is now: another forward may come before
        x_row: Operand | None
        x_col: Operand | None
        if arriving is not None:
            x_row, x_col, ctx.join = arriving.rowwise, arriving.part, arriving.join
        else:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            if levels is not None:
                rows = rows / levels.to(rows.dtype)
            x_row, x_col = numerics.quantize(
                "input",
                rows,
                rowwise=True,
                columnwise=needs_dw,
                training=training,
                position=position,
            )
            ctx.join = None
        w_row, w_col = weight_operands or numerics.quantize_weight(
            weight, levels, columnwise=needs_dx, training=training, position=position
        )
        saved, ctx.rebuild = _flatten([x_col if needs_dw else None, w_col if needs_dx else None])
        ctx.save_for_backward(levels, *saved)
        ctx.numerics, ctx.training, ctx.position = numerics, training, position
        ctx.needs_dw, ctx.put_off = needs_dw, put_off
        ctx.dtypes, ctx.shape = (x.dtype, weight.dtype), x.shape
        assert x_row is not None and w_row is not None
        y = numerics.gemms.gemm("fprop", x_row, w_row, x.dtype)
        # Not a view to autograd, as in nn.Linear: FSDP2 warns of modules that return one.
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw = ctx.needs_input_grad[0], ctx.needs_dw
        levels, *saved = ctx.saved_tensors
        x, w = ctx.rebuild(tuple(saved))
        gemm = ctx.numerics.gemms.gemm
        g_row, g_col = ctx.numerics.quantize(
            "grad_output",
            grad_output.reshape(-1, grad_output.shape[-1]).contiguous(),
            rowwise=needs_dx,
            columnwise=needs_dw,
            training=ctx.training,
            position=ctx.position,
        )
        dx = gemm("dgrad", g_row, w, ctx.dtypes[0]).view(ctx.shape) if needs_dx else None
        # No ctx below, which a put-off wgrad would keep alive.
        dtype, join = ctx.dtypes[1], ctx.join

        def wgrad() -> Tensor:
            dw: Tensor = gemm("wgrad", g_col, x if join is None else join(x), dtype)
            return dw if levels is None else dw * levels.to(dtype)

        if ctx.put_off is not None:
            ctx.put_off(wgrad)
            needs_dw = False
        return dx, wgrad() if needs_dw else None, *[None] * 7


def _flatten(
    operands: list[Operand | None],
) -> tuple[list[Tensor | None], Callable[[tuple[Tensor | None, ...]], list[Operand | None]]]:
    """The operands' tensors, and a function that puts the operands together again.

    What backward needs has to go through autograd as plain tensors: then recomputation and hooks
    on saved tensors see it, and it is freed in time.
    """
    tensors: list[Tensor | None] = []
    shells: list[Operand | None] = []
    for operand in operands:
        if isinstance(operand, QuantizedTensor):
            tensors += [operand.payload, operand.scale_inv, operand.tensor_scale_inv]
            nothing = operand.scale_inv.new_empty(0)  # the shell must not keep them alive
            shells.append(replace(operand, payload=nothing, scale_inv=nothing))
        else:
            tensors += [operand, None, None]
            shells.append(None)

    def rebuild(saved: tuple[Tensor | None, ...]) -> list[Operand | None]:
        rebuilt: list[Operand | None] = []
        for index, shell in enumerate(shells):
            payload, scale_inv, tensor_scale_inv = saved[3 * index : 3 * index + 3]
            if isinstance(shell, QuantizedTensor):
                assert payload is not None and scale_inv is not None
                rebuilt.append(
                    replace(
                        shell,
                        payload=payload,
                        scale_inv=scale_inv,
                        tensor_scale_inv=tensor_scale_inv,
                    )
                )
            else:
                rebuilt.append(payload)
        return rebuilt

    return tensors, rebuild


WeightOperands = tuple[Operand | None, Operand | None]


@dataclass
class WeightCache:
    """Whether layers keep their quantised weight from the first micro batch of a step on.

    Attributes:
        enabled: off, a weight is quantised in every forward.
        version: counts optimizer steps; a weight is kept for one.
    """

    enabled: bool = False
    version: int = 0


class QuantizedLinear(nn.Linear):
    """A linear layer that takes the place of an `nn.Linear` and shares its parameters."""

    numerics: Numerics
    cache: WeightCache
    smooth: Smoothing | None
    cached: tuple[int, WeightOperands] | None = None
    later: LaterWgrads | None = None
    bytes: WeightBytes | None = None  # what is gathered instead of the weight, which has no values

    @classmethod
    def take_over(
        cls,
        linear: nn.Linear,
        numerics: Numerics,
        *,
        cache: WeightCache | None = None,
        smooth: Smoothing | None = None,
    ) -> QuantizedLinear:
        """A quantised layer over the same parameters.

        Args:
            cache: shared by the model's layers; None keeps nothing.
            smooth: how the input's channels are levelled; None leaves them.
        """
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.numerics, layer.cache, layer.smooth = numerics, cache or WeightCache(), smooth
        layer.train(linear.training)
        return layer

    @torch.compiler.disable  # a compiled block has a graph on either side of it
    def forward(self, x: Tensor | ArrivingInput) -> Tensor:
        """x [..., K] → [..., N] in x's dtype."""
        arriving = x if isinstance(x, ArrivingInput) else None
        x = x.stand_in if isinstance(x, ArrivingInput) else x
        levels = None if self.smooth is None else self.smooth.levels(x)
        # Inside a Function's forward gradients are always off, so it is asked here.
        differentiable, weight, put_off = torch.is_grad_enabled(), self.weight, None
        if self.later is not None and differentiable and x.requires_grad:
            # Detached, or autograd would add zeros to the gradient in the meantime.
            weight, put_off = weight.detach(), partial(self.later.put_off, self)
        y = QuantizedMatmul.apply(
            x,
            weight,
            self.numerics,
            self._weight_operands(x.requires_grad and differentiable),
            levels,
            self.training,
            differentiable,
            put_off,
            arriving,
        )
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def _weight_operands(self, columnwise: bool) -> WeightOperands | None:
        """The weight's operands where they are there already: as bytes that were gathered, or in
        the cache."""
        if self.bytes is not None:
            operand = self.bytes.operand(training=self.training)
            return operand, operand if columnwise else None
        if not self.cache.enabled or self.smooth is not None:  # levelled weights follow the input
            return None
        if self.cached is not None and self.cached[0] == self.cache.version:
            operands = self.cached[1]
            if operands[1] is not None or not columnwise:
                return operands
        if not self.training:  # an evaluation leaves no trace: its amax would be missing later
            return None
        position = replace(self.numerics.position)
        operands = self.numerics.quantize_weight(
            self.weight, None, columnwise=columnwise, training=True, position=position
        )
        self.cached = (self.cache.version, operands)
        return operands


class LaterWgrads:
    """Weight gradients that wait for the pipeline schedule: zero bubble runs the backward of a
    micro batch for its input first, which the stage before waits for, and for the weights when
    there is nothing else to do (Qi et al. 2023, arXiv 2401.10241).

    One object for the layers of a pipeline stage. The quantised output gradient is made in the
    first pass, with the scales and random bits of that micro batch, and used in both.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[nn.Parameter, Wgrad]] = []

    def put_off(self, layer: nn.Module, wgrad: Wgrad) -> None:
        """Keep a weight gradient of a layer for later."""
        weight = layer._parameters["weight"]  # the parameter itself, where `weight` is a part of it
        assert weight is not None
        self.waiting.append((weight, wgrad))

    def take(self) -> Callable[[], None]:
        """What waits now, as one call that adds it to the parameters' gradients."""
        waiting, self.waiting = self.waiting, []

        def run() -> None:
            while waiting:  # each is freed as soon as it is done
                weight, wgrad = waiting.pop(0)
                add_gradient(weight, wgrad())

        return run


@torch.no_grad()
def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to a parameter's gradient; to this rank's part of it if the parameter is a DTensor."""
    if isinstance(parameter, DTensor):
        gradient = DTensor.from_local(
            gradient,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@dataclass
class Smoothing:
    """Smooth-SwiGLU: level the channels of a linear's input before it is quantised.

    Each channel is divided by a power of two near its largest magnitude, and the weight's column
    multiplied by it: the product stays the same, exactly, and a channel with outliers no longer
    sets the scale of all. Source: Fishman et al. 2024, "Scaling FP8 training to trillion-token
    LLMs", section 4.4, there with the magnitude itself.

    Attributes:
        group: the ranks that hold other rows of the same input.
    """

    group: dist.ProcessGroup | None = None

    @torch.no_grad()
    def levels(self, x: Tensor) -> Tensor:
        """The powers of two, FP32 [K], of x [..., K]; they count as constants."""
        channels = share_amax(amax(x.reshape(-1, x.shape[-1]), dim=0), self.group)
        usable = (channels > 0) & channels.isfinite()
        levels = torch.where(usable, floor_to_power_of_two(channels), 1.0)
        return levels.clamp(2.0**-60, 2.0**60)
