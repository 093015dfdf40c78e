"""The device code of triton_casts.py: amaxes and casts, one program a tile.

A tile [TILE, TILE] is cut into blocks of R × C that share a scale; of a block that is longer than
the tile it holds a part, with R or C its own size. `top` and `left` count the tiles before it.

Magnitudes are compared as the integers of their bits, which order as the numbers do: a maximum is
the same in any order, and NaN can be told, it is above infinity. Every product and quotient is
rounded by itself: none feeds an addition that a compiler could fuse it with.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)  # bits of FP32; above are NaNs
FLT_MIN = tl.constexpr(2.0**-126)


@triton.jit
def magnitude_bits(values: tl.tensor) -> tl.tensor:
    """The bits of |x|, FP32 → int32; 0 of NaN."""
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > INFINITY, 0, bits)


@triton.jit
def block_max(tile: tl.tensor, R: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """The largest of each block of R × C: [rows, columns] → [rows / R, columns / C]."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    blocks = tl.reshape(tile, (rows // R, R, columns // C, C))
    return tl.max(tl.max(blocks, axis=3), axis=1)


@triton.jit
def multiply_blocks(
    tile: tl.tensor, factors: tl.tensor, R: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Each block of R × C times its factor."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    blocks = tl.reshape(tile, (rows // R, R, columns // C, C))
    return tl.reshape(blocks * factors[:, None, :, None], (rows, columns))


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """`formats.e8m0_decode` of a biased exponent below 255."""
    return tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def form_scales(
    amax: tl.tensor, first: tl.tensor, second: tl.tensor, KIND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(scale, scale_inv) as `ScaleRule.scales` forms them.

    Args:
        amax: the bits of FP32 amaxes.
        first, second: of `triton_casts.rule_numbers`.
        KIND: of the rule.
    """
    magnitude = amax.to(tl.float32, bitcast=True)
    if KIND == "e8m0":
        bits = (magnitude * first * second).to(tl.int32, bitcast=True)
        exponent = bits >> 23
        mantissa = bits & 0x7FFFFF
        up = (mantissa > 0) & (exponent < 254) & ((exponent > 0) | (mantissa > 0x400000))
        exponent = tl.minimum(exponent + up.to(tl.int32), 254)
        scale = power_of_two(254 - exponent)
        scale_inv = power_of_two(exponent)
    else:
        scale = tl.div_rn(first, magnitude)
        scale = tl.where(scale == float("inf"), second, scale)
        scale = tl.maximum(scale, FLT_MIN)
        if KIND == "power_of_two":
            scale = (scale.to(tl.int32, bitcast=True) & INFINITY).to(tl.float32, bitcast=True)
        scale = tl.where((amax == 0) | (amax == INFINITY), 1.0, scale)
        scale_inv = tl.div_rn(1.0, scale)
    return scale, scale_inv


@triton.jit
def to_format(
    values: tl.tensor,
    DTYPE: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
) -> tl.tensor:
    """`formats.cast` to an eight-bit DTYPE; for a longer one `formats.round_to_grid`, in FP32.

    The eight bits are made by cvt.rn.satfinite, which GPUs of compute capability 8.9 have.
    """
    clamped = tl.clamp(values, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    if DTYPE.primitive_bitwidth == 8:
        made = clamped.to(DTYPE)
    else:
        bits = clamped.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 0xFF, MIN_EXPONENT + 127)
        magic = ((exponent + (23 - MANTISSA_BITS) << 23) | 0x400000).to(tl.float32, bitcast=True)
        rounded = ((clamped + magic) - magic).to(tl.int32, bitcast=True)
        signed = (rounded & 0x7FFFFFFF) | (bits & ~0x7FFFFFFF)
        made = signed.to(tl.float32, bitcast=True)
    return made


@triton.jit
def within(
    rows: tl.tensor, columns: tl.tensor, top: tl.tensor, left: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Rows [TILE, 1] and columns [1, TILE] counted from the tile's corner, and which elements are
    the matrix's, [TILE, TILE].

    The corner lies at an offset of 64 bits, and what is counted from it, in 32, stays small.
    """
    row = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    return row, column, (row < rows - top * TILE) & (column < columns - left * TILE)


@triton.jit
def load_tile(
    x: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    top: tl.tensor,
    left: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """One tile of x [rows, columns] in FP32, zeros outside of x."""
    row, column, inside = within(rows, columns, top, left, TILE)
    corner = top.to(tl.int64) * TILE * columns + left * TILE
    values = tl.load(x + corner + (row * columns + column), mask=inside, other=0.0)
    if x.dtype.element_ty == tl.bfloat16:  # the upper half of an FP32
        upper = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
        values = upper.to(tl.float32, bitcast=True)
    return values


@triton.jit
def block_index(
    rows: tl.tensor,
    columns: tl.tensor,
    top: tl.tensor,
    left: tl.tensor,
    row_step: tl.tensor,
    column_step: tl.tensor,
    R: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where the scales of a tile's blocks lie, and which of them exist: [blocks, blocks] each."""
    row = (top * (TILE // R) + tl.arange(0, TILE // R))[:, None]
    column = (left * (TILE // C) + tl.arange(0, TILE // C))[None, :]
    exists = (row * R < rows) & (column * C < columns)
    return row.to(tl.int64) * row_step + column * column_step, exists


@triton.jit
def amax_tile(
    x: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    amax: tl.tensor,
    row_step: tl.tensor,
    column_step: tl.tensor,
    R: tl.constexpr,
    C: tl.constexpr,
    amax_2: tl.tensor,
    row_step_2: tl.tensor,
    column_step_2: tl.tensor,
    R_2: tl.constexpr,
    C_2: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Raise amaxes, bits in int32, to those of one tile; amax_2 may be None."""
    across = tl.cdiv(columns, TILE)
    top = tl.program_id(0) // across
    left = tl.program_id(0) % across
    bits = magnitude_bits(load_tile(x, rows, columns, top, left, TILE))
    where, exists = block_index(rows, columns, top, left, row_step, column_step, R, C, TILE)
    tl.atomic_max(amax + where, block_max(bits, R, C), mask=exists, sem="relaxed")
    if amax_2 is not None:
        where, exists = block_index(
            rows, columns, top, left, row_step_2, column_step_2, R_2, C_2, TILE
        )
        tl.atomic_max(amax_2 + where, block_max(bits, R_2, C_2), mask=exists, sem="relaxed")


@triton.jit
def write_copy(
    values: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    top: tl.tensor,
    left: tl.tensor,
    out: tl.tensor,
    amax: tl.tensor,
    scale: tl.tensor,
    scale_inv: tl.tensor,
    row_step: tl.tensor,
    column_step: tl.tensor,
    R: tl.constexpr,
    C: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    first: tl.tensor,
    second: tl.tensor,
    KIND: tl.constexpr,
    FOLD: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
) -> None:
    """One copy of a tile's values; the other arguments are those of `quantize_tile`."""
    TILE: tl.constexpr = values.shape[0]
    where, exists = block_index(rows, columns, top, left, row_step, column_step, R, C, TILE)
    if scale is not None:
        factor = tl.load(scale + where, mask=exists, other=1.0)
        inverse = tl.load(scale_inv + where, mask=exists, other=1.0)
    else:
        if amax is not None:
            bits = tl.load(amax + where, mask=exists, other=0)
        else:
            bits = block_max(magnitude_bits(values), R, C)
        factor, inverse = form_scales(bits, first, second, KIND)
        tl.store(scale_inv + where, inverse, mask=exists)
    scaled = multiply_blocks(values, factor, R, C)
    made = to_format(scaled, out.dtype.element_ty, MAX, MANTISSA_BITS, MIN_EXPONENT)
    if FOLD:
        made = multiply_blocks(made, inverse, R, C)
    row, column, inside = within(rows, columns, top, left, TILE)
    if TRANSPOSED:
        corner = left.to(tl.int64) * TILE * rows + top * TILE
        place = column * rows + row
    else:
        corner = top.to(tl.int64) * TILE * columns + left * TILE
        place = row * columns + column
    tl.store(out + corner + place, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantize_tile(
    x: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    out: tl.tensor,
    amax: tl.tensor,
    scale: tl.tensor,
    scale_inv: tl.tensor,
    row_step: tl.tensor,
    column_step: tl.tensor,
    R: tl.constexpr,
    C: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    out_2: tl.tensor,
    amax_2: tl.tensor,
    scale_2: tl.tensor,
    scale_inv_2: tl.tensor,
    row_step_2: tl.tensor,
    column_step_2: tl.tensor,
    R_2: tl.constexpr,
    C_2: tl.constexpr,
    TRANSPOSED_2: tl.constexpr,
    first: tl.tensor,
    second: tl.tensor,
    KIND: tl.constexpr,
    FOLD: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One tile of one copy of x or of two, read once.

    Args:
        out: values of a copy, in the order of x, or of its transpose where TRANSPOSED; out_2 may
            be None.
        amax: the amaxes, bits in int32; None: they are the blocks' own, which lie within the tile.
        scale: the scales given; None: they are formed from the amaxes.
        scale_inv: read where the scales are given, written where not. Programs that share a block
            write the same.
        row_step, column_step: in amax, scale and scale_inv, from one block to the next below and
            beside it; 0 in a direction with one block for all.
        first, second, KIND: of `form_scales`.
        FOLD: multiply the values by scale_inv.
    """
    across = tl.cdiv(columns, TILE)
    top = tl.program_id(0) // across
    left = tl.program_id(0) % across
    values = load_tile(x, rows, columns, top, left, TILE)
    write_copy(
        *(values, rows, columns, top, left),
        *(out, amax, scale, scale_inv, row_step, column_step, R, C, TRANSPOSED),
        *(first, second, KIND, FOLD, MAX, MANTISSA_BITS, MIN_EXPONENT),
    )
    if out_2 is not None:
        write_copy(
            *(values, rows, columns, top, left),
            *(out_2, amax_2, scale_2, scale_inv_2, row_step_2, column_step_2, R_2, C_2),
            *(TRANSPOSED_2, first, second, KIND, FOLD, MAX, MANTISSA_BITS, MIN_EXPONENT),
        )
