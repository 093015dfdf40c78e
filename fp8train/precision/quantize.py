"""Quantise a matrix: amaxes, scales, and the cast, with one scale for all of it or one a block.

The plain torch form defines the result on any device; the CPU kernels and the Triton kernels, where
they apply, give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp8train.precision import scaling
from fp8train.precision.formats import Format, round_to_grid
from fp8train.precision.kernels import cpu_kernels, triton_casts
from fp8train.precision.philox import draws
from fp8train.precision.scaling import FLT_MAX, ScaleRule, Scales
from fp8train.precision.tensor import Granularity, QuantizedTensor, spread


@dataclass(frozen=True)
class Payload:
    """The form in which a backend's GEMM takes quantised values.

    Attributes:
        dtype: BF16 or FP32; None for the format's own eight bits.
        fold: "never" keeps values and scales apart; "always" multiplies values by scales that
            are powers of two, so that one plain GEMM does the rest; "exact" does so only where no
            product of two such values can leave FP32's normal range.
    """

    dtype: torch.dtype | None
    fold: Literal["never", "always", "exact"] = "never"

    def dtype_of(self, fmt: Format) -> torch.dtype:
        dtype = self.dtype or fmt.dtype
        assert dtype is not None, f"{fmt.name} has no torch dtype: ask for BF16 or FP32"
        return dtype


@dataclass(frozen=True)
class Draw:
    """The random bits of one stochastic rounding: a function of these numbers alone, so that
    recomputation, another rank count or another machine draws the same.

    Attributes:
        key: of the seed, the layer, the role and the copy (`philox.key_of`).
        tick: the micro batch, of a weight the step.
        row_offset, column_offset: where this matrix lies in the global one.
        rows: int64, on the matrix's device, contiguous: the number of each row, instead of 0, 1, …;
            the offset is added.
    """

    key: int
    tick: int
    row_offset: int = 0
    column_offset: int = 0
    rows: Tensor | None = None

    def noise(self, x: Tensor) -> Tensor:
        """Uniform 24-bit integers of the shape [rows, columns] of x."""
        self._check(x)
        rows, columns = x.shape
        return draws(
            self.key,
            self.tick,
            rows if self.rows is None else self.rows,
            columns,
            row_offset=self.row_offset,
            column_offset=self.column_offset,
            device=x.device,
        )

    def numbers(self, x: Tensor) -> cpu_kernels.Draw:
        """The same for the CPU kernels, while this object lives."""
        self._check(x)
        offsets = self.row_offset, self.column_offset
        return cpu_kernels.Draw.of(self.key, self.tick, *offsets, self.rows)

    def _check(self, x: Tensor) -> None:
        if self.rows is not None and len(self.rows) != len(x):
            raise ValueError(
                f"stochastic rounding knows the numbers of {len(self.rows)} rows and is given "
                f"{len(x)}: tell `begin_micro_batch` the rows of this batch"
            )


def quantize(
    x: Tensor,
    fmt: Format,
    granularity: Granularity,
    rule: ScaleRule,
    payload: Payload,
    *,
    group: dist.ProcessGroup | None = None,
    draw: Draw | None = None,
) -> QuantizedTensor:
    """Quantise x with scales from its own amaxes.

    Args:
        x: BF16 or FP32 [rows, columns]; sizes need not be multiples of the block, the last one
            is then smaller, as if padded with zeros.
        granularity: the shape that shares a scale.
        group: the ranks whose x share these scales, as parts of one matrix.
        draw: for stochastic rounding; None rounds to nearest even.
    """
    if group is None and _fusable(x, fmt, (granularity,), payload, draw):
        return _fused(x, fmt, (granularity,), rule, payload, draw)[0]
    amax = share_amax(block_amax(x, granularity), group)
    scales = rule.scales(amax, fmt.max, overflowing_scale(x.dtype, granularity))
    fold = folds(payload, fmt, granularity, rule, scales.scale_inv)
    return apply_scales(x, scales, fmt, granularity, payload, fold=fold, draw=draw)


def quantize_pair(
    x: Tensor,
    fmt: Format,
    granularities: tuple[Granularity, Granularity],
    rule: ScaleRule,
    payload: Payload,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """`quantize` of x for two granularities, with x read from memory once where that can be."""
    alike = len({overflowing_scale(x.dtype, granularity) for granularity in granularities}) == 1
    if alike and _fusable(x, fmt, granularities, payload):
        first, second = _fused(x, fmt, granularities, rule, payload)
    else:
        first, second = (quantize(x, fmt, each, rule, payload) for each in granularities)
    return first, second


def _fusable(
    x: Tensor,
    fmt: Format,
    granularities: Sequence[Granularity],
    payload: Payload,
    draw: Draw | None = None,
) -> bool:
    """Whether kernels form scales and cast together."""
    on_cpu = _on_cpu(x, payload) and not any(each.is_whole for each in granularities)
    return on_cpu or _on_gpu(x, fmt, granularities, payload, draw)


def _on_cpu(x: Tensor, payload: Payload) -> bool:
    """Whether the CPU kernels apply."""
    return payload.dtype is not None and cpu_kernels.usable(x)


def _on_gpu(
    x: Tensor,
    fmt: Format,
    granularities: Sequence[Granularity],
    payload: Payload,
    draw: Draw | None,
) -> bool:
    """Whether the Triton kernels apply."""
    dtype = payload.dtype_of(fmt)
    made = all(triton_casts.supports(fmt, each, dtype) for each in granularities)
    return made and draw is None and triton_casts.usable(x)


def triton_copy(granularity: Granularity, payload: Payload) -> triton_casts.Copy:
    """Eight-bit copies scaled along columns are stored as torch's GEMMs read them: transposed."""
    along_columns = granularity.columns == 1 and granularity.rows != 1
    return triton_casts.Copy(granularity, transposed=payload.dtype is None and along_columns)


def _fused(
    x: Tensor,
    fmt: Format,
    granularities: Sequence[Granularity],
    rule: ScaleRule,
    payload: Payload,
    draw: Draw | None = None,
) -> list[QuantizedTensor]:
    """Amaxes, scales and casts of one or two copies together, by kernels."""
    whole = any(granularity.is_whole for granularity in granularities)
    fold = payload.fold != "never" and rule.power_of_two and not whole
    dtype, overflow = payload.dtype_of(fmt), overflowing_scale(x.dtype, granularities[0])
    made: Sequence[tuple[Tensor, Tensor]]
    if x.is_cuda:
        targets = [triton_copy(granularity, payload) for granularity in granularities]
        made = triton_casts.quantize(x, fmt, targets, rule, dtype, overflow=overflow, fold=fold)
    else:
        made = cpu_kernels.quantize(
            x,
            fmt,
            [granularity.block(*x.shape) for granularity in granularities],
            _kernel_rule(rule, fmt, overflow),
            dtype,
            fold=fold,
            draw=None if draw is None else draw.numbers(x),
        )
    copies = []
    for granularity, (values, scale_inv) in zip(granularities, made, strict=True):
        if fold and not folds(payload, fmt, granularity, rule, scale_inv):
            scales = Scales(scale_inv.reciprocal(), scale_inv)  # exact: they are powers of two
            copies.append(apply_scales(x, scales, fmt, granularity, payload, draw=draw))
        else:
            copies.append(QuantizedTensor(values, scale_inv, fmt, granularity, folded=fold))
    return copies


def _kernel_rule(rule: ScaleRule, fmt: Format, overflow: float) -> cpu_kernels.Rule:
    if rule.kind == "e8m0":
        return cpu_kernels.Rule.of(rule.kind, 2.0**rule.margin, 1.0 / fmt.max)
    return cpu_kernels.Rule.of(rule.kind, fmt.max * 2.0**-rule.margin, overflow)


def overflowing_scale(dtype: torch.dtype, granularity: Granularity) -> float:
    """What a scale that overflows becomes, of values in a type."""
    return torch.finfo(dtype).max if granularity.is_block else FLT_MAX


def block_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """max |x| of each block in FP32, `granularity.grid(...)`; NaN does not enter, Inf does."""
    if granularity.is_whole and cpu_kernels.usable(x):
        return torch.tensor(cpu_kernels.amax(x)).view(1, 1)
    if granularity.is_whole and triton_casts.usable(x):
        return triton_casts.amax(x, granularity)
    return scaling.amax(tiles(x, granularity), dim=(1, 3))


def tiles(x: Tensor, granularity: Granularity) -> Tensor:
    """x [rows, columns], padded with zeros, as [block rows, rows of one, block columns, columns of
    one]."""
    r, c = granularity.block(*x.shape)
    down, across = granularity.grid(*x.shape)
    padded = F.pad(x, (0, across * c - x.shape[1], 0, down * r - x.shape[0]))
    return padded.view(down, r, across, c)


def share_amax(amax: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The maximum over the ranks of a group."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return amax


# Products of two values between these bounds, and sums of 2^10 of them, are normal in FP32.
SMALLEST, LARGEST = 2.0**-63, 2.0**58


def folds(
    payload: Payload, fmt: Format, granularity: Granularity, rule: ScaleRule, scale_inv: Tensor
) -> bool:
    """Whether scales are multiplied into the values."""
    if payload.fold == "never" or not rule.power_of_two or granularity.is_whole:
        return False
    if payload.fold == "always":
        return True
    least, most = (bound.item() for bound in scale_inv.aminmax())
    return fmt.smallest * least >= SMALLEST and fmt.max * most <= LARGEST


def apply_scales(
    x: Tensor,
    scales: Scales,
    fmt: Format,
    granularity: Granularity,
    payload: Payload,
    *,
    fold: bool = False,
    draw: Draw | None = None,
) -> QuantizedTensor:
    """Cast x · scale to the format, with the scales given.

    Args:
        x: BF16 or FP32 [rows, columns].
        scales: FP32, `granularity.grid(rows, columns)` each.
        fold: multiply the result by scale_inv.
    """
    dtype = payload.dtype_of(fmt)
    if _on_gpu(x, fmt, (granularity,), payload, draw):
        copy = triton_copy(granularity, payload)
        (values,) = triton_casts.cast(x, fmt, [copy], [scales], dtype, fold=fold)
        return QuantizedTensor(values, scales.scale_inv, fmt, granularity, folded=fold)
    if _on_cpu(x, payload):
        values = cpu_kernels.cast(
            *(x, scales.scale.contiguous(), scales.scale_inv.contiguous(), fmt),
            *(granularity.block(*x.shape), dtype),
            fold=fold,
            draw=None if draw is None else draw.numbers(x),
        )
        return QuantizedTensor(values, scales.scale_inv, fmt, granularity, folded=fold)
    noise = None if draw is None else draw.noise(x)
    values = round_to_grid(x.float() * spread(scales.scale, granularity, *x.shape), fmt, noise)
    if fold:
        values = values * spread(scales.scale_inv, granularity, *x.shape)
    return QuantizedTensor(values.to(dtype), scales.scale_inv, fmt, granularity, folded=fold)
