"""Amaxes, scales and casts on a CUDA GPU, by Triton, in one pass over memory or two.

Blocks that lie within a tile get their scales from it, in one pass. A scale for a whole row, column
or tensor needs its amax first, by a pass of its own. The bits are those of the plain torch
functions. Values come in the format's eight bits, cast by the GPU's saturating instruction, or in
BF16 or FP32, rounded by FP32 arithmetic.

torch brings Triton in its CUDA builds; the device code is imported when it is first called.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8train.precision.formats import Format
from fp8train.precision.scaling import FLT_MAX, ScaleRule, Scales
from fp8train.precision.tensor import Granularity

DTYPES = (torch.bfloat16, torch.float32)
LARGEST_BLOCK = 128
LONGEST = 2**24  # rows or columns: within a tile, offsets are of 32 bits


@dataclass(frozen=True)
class Copy:
    """One copy to be made of a matrix.

    Attributes:
        granularity: the shape that shares a scale.
        transposed: its values are stored column by column, so that its transpose is contiguous.
    """

    granularity: Granularity
    transposed: bool = False

    def empty(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for the values, [rows, columns]."""
        rows, columns = x.shape
        if self.transposed:
            return x.new_empty(columns, rows, dtype=dtype).t()
        return x.new_empty(rows, columns, dtype=dtype)


class Quantized(NamedTuple):
    """values: [rows, columns]; scale_inv: FP32, one a block, `granularity.grid(rows, columns)`."""

    values: Tensor
    scale_inv: Tensor


@functools.cache
def available() -> bool:
    """Whether torch is built for CUDA and Triton is installed."""
    return torch.version.cuda is not None and find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """Whether the kernels take this matrix: BF16 or FP32 [rows, columns], contiguous, not empty,
    less than 2^24 in a direction, on a CUDA GPU."""
    fits = x.dtype in DTYPES and x.ndim == 2 and x.is_contiguous()
    return fits and x.numel() > 0 and max(x.shape) < LONGEST and x.is_cuda and available()


def supports(fmt: Format, granularity: Granularity, dtype: torch.dtype) -> bool:
    """Whether the kernels make values of a format in dtype, its own or BF16 or FP32, with one scale
    for blocks of that size: a power of two up to 128 in a direction, or all of it."""
    for size in (granularity.rows or 1, granularity.columns or 1):
        if size > LARGEST_BLOCK or size & (size - 1):
            return False
    return fmt.signed_zero and dtype in (*DTYPES, fmt.dtype)


def amax(x: Tensor, granularity: Granularity) -> Tensor:
    """max |x| of each block in FP32, `granularity.grid(...)`; NaN does not enter, Inf does.

    Args:
        x: usable.
    """
    return amaxes(x, [granularity])[0]


def amaxes(x: Tensor, granularities: Sequence[Granularity]) -> list[Tensor]:
    """`amax` for one granularity or two, x read once."""
    found = [per_block(x, granularity).zero_() for granularity in granularities]
    amax_launch(x, granularities, found).run()
    return found


def quantize(
    x: Tensor,
    fmt: Format,
    copies: Sequence[Copy],
    rule: ScaleRule,
    dtype: torch.dtype,
    *,
    overflow: float = FLT_MAX,
    fold: bool = False,
) -> list[Quantized]:
    """One copy of x or two, with scales from x's own amaxes.

    Args:
        x: usable.
        fmt, dtype: of the values; supported with each granularity of `copies`.
        overflow: what a scale that overflows becomes; e8m0 has none.
        fold: multiply the values by scale_inv; in BF16 and FP32 only.
    """
    shared = list({copy.granularity: None for copy in copies if not copy.granularity.is_block})
    found = dict(zip(shared, amaxes(x, shared), strict=True)) if shared else {}
    targets = [
        Target(
            copy,
            copy.empty(x, dtype),
            per_block(x, copy.granularity),
            amax=found.get(copy.granularity),
        )
        for copy in copies
    ]
    quantize_launch(x, fmt, targets, rule, overflow=overflow, fold=fold).run()
    return [Quantized(target.values, target.scale_inv) for target in targets]


def cast(
    x: Tensor,
    fmt: Format,
    copies: Sequence[Copy],
    scales: Sequence[Scales],
    dtype: torch.dtype,
    *,
    fold: bool = False,
) -> list[Tensor]:
    """The values of x · scale in one copy or two, with the scales given.

    Arguments as for `quantize`; scales: of each copy, FP32, `granularity.grid(...)`.
    """
    targets = [
        Target(copy, copy.empty(x, dtype), each.scale_inv.contiguous(), each.scale.contiguous())
        for copy, each in zip(copies, scales, strict=True)
    ]
    quantize_launch(x, fmt, targets, ScaleRule(), fold=fold).run()
    return [target.values for target in targets]


def per_block(x: Tensor, granularity: Granularity) -> Tensor:
    """Room for one FP32 a block."""
    return x.new_empty(granularity.grid(*x.shape), dtype=torch.float32)


@dataclass(frozen=True)
class Target:
    """Where a copy goes, and where its scales come from.

    Attributes:
        values: `copy.empty`.
        scale_inv: FP32, one a block; read where there is a scale, else written.
        scale, amax: FP32, one a block; without either the amaxes are those of blocks in a tile.
    """

    copy: Copy
    values: Tensor
    scale_inv: Tensor
    scale: Tensor | None = None
    amax: Tensor | None = None


@dataclass(frozen=True)
class Launch:
    """A call of a kernel.

    Attributes:
        kernel: its name.
        grid: how many programs there are, in up to three dimensions.
        warps: of a program.
        arguments: by name.
        module: of this package, which has the kernel.
    """

    kernel: str
    grid: tuple[int, ...]
    warps: int
    arguments: dict[str, Any]
    module: str = "triton_kernels"

    def function(self) -> Any:
        """The kernel itself."""
        return getattr(import_module(f"{__package__}.{self.module}"), self.kernel)

    def run(self) -> None:
        where = next(each for each in self.arguments.values() if isinstance(each, Tensor))
        with torch.cuda.device_of(where):  # Triton launches on the current device
            self.function()[self.grid](**self.arguments, num_warps=self.warps)


def amax_launch(x: Tensor, granularities: Sequence[Granularity], found: Sequence[Tensor]) -> Launch:
    """The launch that raises amaxes, zeros before, for one granularity or two."""
    tile = tile_of(granularities)
    arguments: dict[str, Any] = {"amax_2": None, **_blocks("_2", None, x, tile)}
    for suffix, granularity, amax in zip(("", "_2"), granularities, found, strict=False):
        arguments |= {f"amax{suffix}": _bits(amax), **_blocks(suffix, granularity, x, tile)}
    return _launch("amax_tile", x, tile, arguments)


def quantize_launch(
    x: Tensor,
    fmt: Format,
    targets: Sequence[Target],
    rule: ScaleRule,
    *,
    overflow: float = FLT_MAX,
    fold: bool = False,
) -> Launch:
    """The launch that writes one target or two."""
    tile = tile_of([target.copy.granularity for target in targets])
    first, second = rule_numbers(rule, fmt, overflow)
    arguments: dict[str, Any] = {
        **{"first": first, "second": second, "KIND": rule.kind, "FOLD": fold},
        **{"MAX": fmt.max, "MANTISSA_BITS": fmt.mantissa_bits, "MIN_EXPONENT": fmt.min_exponent},
        **{"out_2": None, "amax_2": None, "scale_2": None, "scale_inv_2": None},
        **{"TRANSPOSED_2": False, **_blocks("_2", None, x, tile)},
    }
    for suffix, target in zip(("", "_2"), targets, strict=False):
        arguments |= {
            f"out{suffix}": target.values,
            f"amax{suffix}": None if target.amax is None else _bits(target.amax),
            f"scale{suffix}": target.scale,
            f"scale_inv{suffix}": target.scale_inv,
            f"TRANSPOSED{suffix}": target.copy.transposed,
            **_blocks(suffix, target.copy.granularity, x, tile),
        }
    return _launch("quantize_tile", x, tile, arguments)


def tile_of(granularities: Sequence[Granularity]) -> int:
    """Rows and columns of a tile: 64, or what the largest block of fixed size needs."""
    sizes = (size or 1 for each in granularities for size in (each.rows, each.columns))
    return max(64, *sizes)


def rule_numbers(rule: ScaleRule, fmt: Format, overflow: float) -> tuple[float, float]:
    """What `triton_kernels.form_scales` computes with: 2^margin and 1 / max for e8m0, else
    max·2^-margin and the scale where that overflows."""
    if rule.kind == "e8m0":
        return 2.0**rule.margin, 1.0 / fmt.max
    return fmt.max * 2.0**-rule.margin, overflow


def _blocks(suffix: str, granularity: Granularity | None, x: Tensor, tile: int) -> dict[str, int]:
    """A block's part of a tile, and the steps from block to block where each has one number."""
    granularity = granularity or Granularity(1, 1)
    _, across = granularity.grid(*x.shape)
    return {
        f"row_step{suffix}": 0 if granularity.rows is None else across,
        f"column_step{suffix}": 0 if granularity.columns is None else 1,
        f"R{suffix}": granularity.rows or tile,
        f"C{suffix}": granularity.columns or tile,
    }


def _bits(amax: Tensor) -> Tensor:
    return amax.view(torch.int32)


def _launch(kernel: str, x: Tensor, tile: int, arguments: dict[str, Any]) -> Launch:
    rows, columns = x.shape
    programs = -(-rows // tile) * -(-columns // tile)
    warps = tile // 16  # more would leave a thread of the larger tile too few registers
    about = {"x": x, "rows": rows, "columns": columns, "TILE": tile}
    return Launch(kernel, (programs,), warps, {**about, **arguments})
