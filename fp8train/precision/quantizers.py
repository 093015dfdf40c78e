"""One layer's quantisers: a recipe applied to its input, weight and output gradient.

Each call gives two operands: `rowwise`, scaled for the GEMM that reduces over the columns, and
`columnwise`, for the one that reduces over the rows. With one scale a tensor they are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fp8train.precision.delayed import DelayedState
from fp8train.precision.formats import Format
from fp8train.precision.nvfp4 import hadamard, quantize_nvfp4
from fp8train.precision.philox import key_of
from fp8train.precision.quantize import (
    Draw,
    Payload,
    apply_scales,
    block_amax,
    overflowing_scale,
    quantize,
    quantize_pair,
)
from fp8train.precision.recipes import DelayedScaling, NVFP4Scaling, Recipe
from fp8train.precision.scaling import Scales
from fp8train.precision.split import WHOLE, Split
from fp8train.precision.tensor import TENSOR, QuantizedTensor

Operand = QuantizedTensor | Tensor  # a Tensor stays in high precision


@dataclass
class Position:
    """Where training is, for stochastic rounding; one object for all layers of a model.

    Attributes:
        step: of the optimizer; weights draw once a step.
        micro_batch: the first sample of the micro batch; inputs and gradients draw in each.
        rows: int64 [B, T] on the device: which rows of the global micro batch this rank's tokens
            are; None for 0 to B·T − 1.
    """

    step: int = 0
    micro_batch: int = 0
    rows: Tensor | None = None


class Quantizer(Protocol):
    """Turns one tensor of a layer into operands.

    Args:
        x: BF16 or FP32 [rows, columns].
        rowwise, columnwise: which operands are needed; the others are None.
        training: whether this call may leave a trace, such as an amax.
        position: of the micro batch that x belongs to.
    """

    def __call__(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, training: bool, position: Position
    ) -> tuple[Operand | None, Operand | None]: ...

    def note(self, x: Tensor) -> None:
        """Leave the trace in training that quantising x would, where others quantise it."""
        ...


@dataclass
class HighPrecision:
    """No quantisation: the values as they are, for GEMMs in BF16."""

    def __call__(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, training: bool, position: Position
    ) -> tuple[Operand | None, Operand | None]:
        return x if rowwise else None, x if columnwise else None

    def note(self, x: Tensor) -> None:
        """Nothing to leave."""


@dataclass(frozen=True)
class Rounding:
    """How one role of one layer rounds: to nearest even, or stochastically with bits of its own.

    Attributes:
        stochastic: which of the two.
        layer: its full name.
        role: "input", "weight" or "grad_output".
        seed: of the run.
        split: where the matrix lies in the whole one.
    """

    stochastic: bool = False
    layer: str = ""
    role: str = ""
    seed: int = 0
    split: Split = WHOLE

    def draw(self, copy: int, position: Position, padding: int = 0) -> Draw | None:
        """The random bits of the row-wise (0) or column-wise (1) copy; None for nearest even.

        Args:
            padding: rows added behind the last one; they are numbered on from there.
        """
        if not self.stochastic:
            return None
        key = key_of(self.seed, self.layer, self.role, ("rowwise", "columnwise")[copy])
        column_offset = self.split.column_offset
        if self.role == "weight":
            return Draw(key, position.step, self.split.row_offset, column_offset)
        rows = position.rows
        if rows is not None:
            index, count = self.split.sequence_part
            rows = rows.chunk(count, dim=-1)[index].flatten()
            if padding:
                added = torch.arange(1, padding + 1, device=rows.device)
                rows = torch.cat((rows, rows[-1] + added))
        return Draw(key, position.micro_batch, 0, column_offset, rows)


NEAREST = Rounding()


@dataclass
class Scaled:
    """Scales from the tensor's own amaxes: every recipe but delayed scaling.

    Attributes:
        recipe: any but `DelayedScaling`.
        role: "input", "weight" or "grad_output".
        payload: the form that the backend takes.
        split: how ranks share the matrix.
    """

    recipe: Recipe
    role: str
    payload: Payload
    rounding: Rounding = NEAREST
    split: Split = WHOLE

    def __call__(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, training: bool, position: Position
    ) -> tuple[Operand | None, Operand | None]:
        shared = self.recipe.shares_copies(self.role)
        if rowwise and columnwise and not shared and (fmt := self._alike()):
            granularities = self.recipe.granularity(self.role)
            return quantize_pair(x, fmt, granularities, self.recipe.rule, self.payload)
        return both_copies(partial(self._copy, x, position), shared, rowwise, columnwise)

    def note(self, x: Tensor) -> None:
        """Nothing to leave."""

    def note_amax(self, amax: Tensor) -> None:
        """Nothing to leave."""

    def weight_scales(self, amax: Tensor) -> Scales:
        """The scales of a BF16 weight's blocks with these amaxes, those of the whole weight."""
        fmt, granularity = self.recipe.formats.weight.rowwise, self.recipe.granularity("weight")[0]
        assert fmt is not None
        overflow = overflowing_scale(torch.bfloat16, granularity)
        return self.recipe.rule.scales(amax, fmt.max, overflow)

    def _alike(self) -> Format | None:
        """The format of both copies where they differ in granularity alone, so that one pass over
        x makes them; None where they need more."""
        rowwise, columnwise = self.recipe.formats.of(self.role)
        granularities = self.recipe.granularity(self.role)
        alone = all(self.split.sharing(granularity) is None for granularity in granularities)
        simple = alone and not self.rounding.stochastic
        nvfp4 = isinstance(self.recipe, NVFP4Scaling)
        return rowwise if simple and not nvfp4 and rowwise == columnwise else None

    def _copy(self, x: Tensor, position: Position, copy: int) -> Operand:
        """The row-wise (0) or column-wise (1) copy, each quantised from high precision."""
        recipe, fmt = self.recipe, self.recipe.formats.of(self.role)[copy]
        if fmt is None:
            return x
        granularity = recipe.granularity(self.role)[copy]
        if isinstance(recipe, NVFP4Scaling):
            rows = len(x)
            if copy == 1 and self.role != "weight" and recipe.transforms_wgrad:
                x = hadamard(x)
            draw = self.rounding.draw(copy, position, padding=len(x) - rows)
            group = self.split.both  # all blocks have the tensor's scale in common
            return quantize_nvfp4(
                x, granularity, self.payload, margin=recipe.margin, group=group, draw=draw
            )
        draw, group = self.rounding.draw(copy, position), self.split.sharing(granularity)
        return quantize(x, fmt, granularity, recipe.rule, self.payload, group=group, draw=draw)


@dataclass
class Delayed:
    """Scales of earlier steps.

    Attributes:
        recipe: of this layer.
        role: "input", "weight" or "grad_output".
        payload: the form that the backend takes.
        state: of the whole model.
        rows: where the state has this role's two copies; −1 for one that is not quantised.
    """

    recipe: DelayedScaling
    role: str
    payload: Payload
    state: DelayedState
    rows: tuple[int, int]
    rounding: Rounding = NEAREST

    def __call__(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, training: bool, position: Position
    ) -> tuple[Operand | None, Operand | None]:
        if training:
            asked = zip(self.rows, (rowwise, columnwise), strict=True)
            self._stage(_amax(x), {row for row, wanted in asked if wanted})
        return both_copies(
            partial(self._copy, x, position),
            self.recipe.shares_copies(self.role),
            rowwise,
            columnwise,
        )

    def note(self, x: Tensor) -> None:
        """Stage the amax of both copies."""
        self.note_amax(_amax(x))

    def note_amax(self, amax: Tensor) -> None:
        """The same for an amax that is known."""
        self._stage(amax, set(self.rows))

    def _stage(self, amax: Tensor, rows: set[int]) -> None:
        for row in rows - {-1}:
            self.state.stage(row, amax.view(()))

    def weight_scales(self, amax: Tensor) -> Scales:
        """The scale of earlier steps, whatever the amax is now."""
        return self._scales(0)

    def _scales(self, copy: int) -> Scales:
        scale = self.state.scale[self.rows[copy]].clone().view(1, 1)  # the state will change
        return Scales(scale, scale.reciprocal())

    def _copy(self, x: Tensor, position: Position, copy: int) -> Operand:
        fmt = self.recipe.formats.of(self.role)[copy]
        if fmt is None:
            return x
        draw = self.rounding.draw(copy, position)
        return apply_scales(x, self._scales(copy), fmt, TENSOR, self.payload, draw=draw)


def _amax(x: Tensor) -> Tensor:
    return block_amax(x, TENSOR)


def both_copies(
    make: Callable[[int], Operand], shared: bool, rowwise: bool, columnwise: bool
) -> tuple[Operand | None, Operand | None]:
    """The wanted ones of make(0), the row-wise copy, and make(1); one serves as both if shared."""
    if shared and (rowwise or columnwise):
        operand = make(0)
        return operand if rowwise else None, operand if columnwise else None
    return make(0) if rowwise else None, make(1) if columnwise else None
