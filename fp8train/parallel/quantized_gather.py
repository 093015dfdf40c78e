"""Sequence parallelism's all-gathers in eight bits.

Each tensor rank quantises its tokens, with scales that it shares with the others where blocks are
larger than its part, and the bytes are gathered: the row-wise copy in forward, the column-wise one
in backward, when the weight gradient asks for it. Kept in between is a rank's own part. Scales and
payloads are those of the whole input, bit for bit; but for NaN under NVFP4, whose E2M1 has none: it
travels as 6. The residual stream still takes it to the loss.

Partial sums, which reduce-scatters add up, stay in BF16 or FP32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8train.layout import Layout
from fp8train.parallel.collectives import all_gather, reduce_scatter
from fp8train.precision.formats import cast, decode
from fp8train.precision.linear import ArrivingInput, QuantizedLinear
from fp8train.precision.plan import LayerPlan
from fp8train.precision.quantize import folds
from fp8train.precision.quantizers import Operand, Scaled
from fp8train.precision.recipes import NVFP4Scaling, Recipe
from fp8train.precision.tensor import QuantizedTensor, spread

SIBLINGS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}


def quantized_gathers(
    parents: list[str], plans: dict[str, LayerPlan], layout: Layout, length: int
) -> set[str]:
    """Of attentions and MLPs, by full name, those whose input is gathered in eight bits.

    Their linears must agree on what the input becomes, and no block may straddle parts.
    """
    if not layout.sequence:
        return set()
    part = length // layout.context // layout.tensor
    found = set()
    for parent in parents:
        names = [f"{parent}.{name}" for name in SIBLINGS[parent.rpartition(".")[2]]]
        recipes = {plans[name].recipe if name in plans else None for name in names}
        if len(recipes) == 1 and (recipe := recipes.pop()) is not None and fits(recipe, part):
            found.add(parent)
    return found


def fits(recipe: Recipe, tokens: int) -> bool:
    """Whether parts of so many tokens can be quantised one by one, with one result for siblings."""
    if "input" in recipe.stochastic or recipe.smooth or recipe.formats.input.rowwise is None:
        return False  # layers draw bits of their own; levels are of the whole input
    granularity = recipe.granularity("input")[1]
    block = granularity.rows or 1
    if isinstance(recipe, NVFP4Scaling):
        block = recipe.size  # of the Hadamard transform too
    return tokens % block == 0


class EnterQuantized:
    """Hook: the first input of attention or MLP [B, T/t, D] becomes an `ArrivingInput` of T."""

    def __init__(self, linears: list[QuantizedLinear], group: dist.ProcessGroup) -> None:
        self.linears, self.group = linears, group

    @torch.compiler.disable
    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = inputs
        return self.gather(x), *rest

    def gather(self, x: Tensor) -> ArrivingInput:
        """Quantise this rank's part x [B, T/t, D] and gather its row-wise copy."""
        first, *others = self.linears
        rows, batch = x.detach().reshape(-1, x.shape[-1]).contiguous(), x.shape[0]
        row, column = first.numerics.quantize(
            "input",
            rows,
            rowwise=True,
            columnwise=torch.is_grad_enabled(),
            training=first.training,
            position=replace(first.numerics.position),
        )
        assert row is not None
        for other in others:  # the same values, of which each keeps its own history
            other.numerics.saw("input", rows, row, training=other.training)
        stand_in = _StandIn.apply(x, self.group)
        join = Join(self, batch, len(self.linears))
        return ArrivingInput(stand_in, self.whole(row, batch), column, join)

    def whole(self, part: Operand, batch: int) -> Operand:
        """The operand [B·T, K] of which each rank has the rows of its part of T, [B·T/t, K]."""

        def rows(x: Tensor) -> Tensor:
            return all_gather(x.reshape(batch, -1, x.shape[-1]), self.group).flatten(0, 1)

        if isinstance(part, Tensor):
            return rows(part)
        codes = cast(part.grid_values(), part.fmt)
        values = decode(rows(codes.view(torch.uint8)).view(codes.dtype), part.fmt)
        # One block down all rows: every rank has its scales already.
        scale_inv = part.scale_inv if part.granularity.rows is None else rows(part.scale_inv)
        folded = self.folds(part, scale_inv)
        if folded:
            values = values * spread(scale_inv, part.granularity, *values.shape)
        return replace(
            part,
            payload=values.to(part.payload.dtype).contiguous(),
            scale_inv=scale_inv,
            folded=folded,
        )

    def folds(self, part: QuantizedTensor, scale_inv: Tensor) -> bool:
        """Whether the whole operand's values are multiplied by its scales, as in one process."""
        quantizer = self.linears[0].numerics.quantizers["input"]
        if part.tensor_scale_inv is not None or not isinstance(quantizer, Scaled):
            return part.folded
        rule = quantizer.recipe.rule
        return folds(quantizer.payload, part.fmt, part.granularity, rule, scale_inv)


class _StandIn(torch.autograd.Function):
    """[B, T/t, D] → a tensor of the shape [B, T, D] without values, for the gradient's way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        batch, length, size = x.shape
        return x.new_zeros(1).expand(batch, length * group.size(), size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


@dataclass
class Join:
    """Puts the parts of a column-wise copy together, once for all linears that take it.

    Attributes:
        enter: who gathers.
        batch: B.
        consumers: linears that will ask.
    """

    enter: EnterQuantized
    batch: int
    consumers: int
    joined: Operand | None = None

    def __call__(self, part: Operand) -> Operand:
        """The whole copy, from this rank's part."""
        whole = self.joined
        if whole is None:
            whole = self.enter.whole(part, self.batch)
        self.consumers -= 1
        self.joined = whole if self.consumers else None
        return whole
