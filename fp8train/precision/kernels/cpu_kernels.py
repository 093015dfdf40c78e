"""Call cpu_kernels.cpp: the emulated backend's quantisers in few passes over memory.

Without a compiler `library()` is None and callers take the plain torch functions, which give the
same bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fp8train.precision.formats import Format
from fp8train.precision.kernels.compiled import addressable, compiled, pointer

DTYPES = (torch.bfloat16, torch.float32)


class Rule(Structure):
    """How an amax becomes a scale: a kind and its two FP32 numbers.

    fp32 and power_of_two: max·2^-margin, and the scale where that overflows. e8m0: 2^margin and
    1 / max. nvfp4: S / 6 and 1 / S, with S the tensor's encoding scale.
    """

    KINDS = ("fp32", "power_of_two", "e8m0", "nvfp4")
    _fields_ = (("kind", c_int32), ("first", c_float), ("second", c_float))

    @classmethod
    def of(cls, kind: str, first: float, second: float) -> Rule:
        return cls(cls.KINDS.index(kind), first, second)


class Draw(Structure):
    """The numbers of `quantize.Draw`, in its order."""

    _fields_ = (
        *(("key", c_uint64), ("tick", c_uint64)),
        *(("row_offset", c_int64), ("column_offset", c_int64), ("rows", c_void_p)),
    )

    @classmethod
    def of(
        cls, key: int, tick: int, row_offset: int, column_offset: int, rows: Tensor | None
    ) -> Draw:
        """rows: addressable int64, alive as long as this is used; None numbers them 0, 1, …."""
        if rows is None:
            return cls(key, tick, row_offset, column_offset, None)
        assert rows.dtype == torch.int64 and addressable(rows)
        return cls(key, tick, row_offset, column_offset, pointer(rows))


class Quantized(NamedTuple):
    """values: [rows, columns]; scale_inv: FP32, one a block."""

    values: Tensor
    scale_inv: Tensor


class _Matrix(Structure):
    _fields_ = (("data", c_void_p), *((n, c_int64) for n in ("rows", "columns")), ("bf16", c_int32))

    @classmethod
    def of(cls, x: Tensor) -> _Matrix:
        rows, columns = x.shape
        return cls(pointer(x), rows, columns, x.dtype == torch.bfloat16)


class FormatFields(Structure):
    """The numbers of a format that rounding to its grid takes."""

    _fields_ = (
        ("max", c_float),
        *((n, c_int32) for n in ("mantissa_bits", "min_exponent", "signed_zero")),
    )

    @classmethod
    def of(cls, fmt: Format) -> FormatFields:
        return cls(fmt.max, fmt.mantissa_bits, fmt.min_exponent, fmt.signed_zero)


class _Copy(Structure):
    _fields_ = (
        ("out", _Matrix),
        *(("scale", c_void_p), ("scale_inv", c_void_p)),
        *(("block_rows", c_int64), ("block_columns", c_int64)),
        ("fold", c_int32),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they can't be built (said once in the log)."""
    return compiled(Path(__file__).with_suffix(".cpp"))


def usable(x: Tensor) -> bool:
    """Whether the kernels take this tensor: BF16 or FP32 [rows, columns], not empty, contiguous, in
    the CPU's memory."""
    fits = x.dtype in DTYPES and x.ndim == 2 and x.numel() > 0
    return fits and addressable(x) and library() is not None


def amax(x: Tensor) -> float:
    """max |x|; NaN does not enter. x: usable."""
    function = _library().fp8_amax
    function.restype = c_float
    return float(function(byref(_Matrix.of(x))))


def quantize(
    x: Tensor,
    fmt: Format,
    blocks: Sequence[tuple[int, int]],
    rule: Rule,
    dtype: torch.dtype,
    *,
    fold: bool = False,
    draw: Draw | None = None,
) -> list[Quantized]:
    """Copies of x, each with scales of its own amaxes, from one pass over memory.

    Args:
        x: usable.
        blocks: the shape that shares a scale, for each of the copies.
        dtype: of the values, BF16 or FP32.
        fold: multiply the values by scale_inv.
        draw: for stochastic rounding, the same in all copies.
    """
    rows, columns = x.shape
    made = [
        Quantized(torch.empty_like(x, dtype=dtype), torch.empty(-(-rows // r), -(-columns // c)))
        for r, c in blocks
    ]
    copies = (_Copy * len(made))(
        *(
            _Copy(_Matrix.of(values), None, pointer(scale_inv), *block, fold)
            for (values, scale_inv), block in zip(made, blocks, strict=True)
        )
    )
    _library().fp8_quantize(
        *(byref(_Matrix.of(x)), copies, len(made), byref(rule), byref(FormatFields.of(fmt))),
        None if draw is None else byref(draw),
    )
    return made


def cast(
    x: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    fmt: Format,
    block: tuple[int, int],
    dtype: torch.dtype,
    *,
    fold: bool = False,
    draw: Draw | None = None,
) -> Tensor:
    """The values of x · scale on the format's grid, with the scales given, one a block.

    Arguments as for `quantize`; scale and scale_inv: FP32, contiguous.
    """
    out = torch.empty_like(x, dtype=dtype)
    copy = _Copy(_Matrix.of(out), pointer(scale), pointer(scale_inv), *block, fold)
    _library().fp8_cast(
        *(byref(_Matrix.of(x)), byref(copy), byref(FormatFields.of(fmt))),
        None if draw is None else byref(draw),
    )
    return out


def hadamard(x: Tensor, signs: Sequence[float]) -> Tensor:
    """The transform of `nvfp4.hadamard`, of x's dtype, its rows made up to a multiple of 16.

    Args:
        x: usable.
        signs: ±1 in front of each of 16 rows.
    """
    rows, columns = x.shape
    out = x.new_empty(-(-rows // len(signs)) * len(signs), columns)
    numbers = (c_float * len(signs))(*signs)
    _library().fp8_hadamard(byref(_Matrix.of(x)), byref(_Matrix.of(out)), numbers)
    return out


def _library() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "ask usable() first"
    return loaded
