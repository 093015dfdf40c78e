"""What Hopper's tensor core does to an FP8 sum, bit for bit.

An FP8 GEMM on an H100 has FP32 outputs, but its accumulator keeps far fewer bits. One instruction
takes 32 of K. For each element of the result it

1. gives each product the exponent E(a) + E(b), without normalising it; a subnormal value has its
   format's smallest exponent, a zero takes no part;
2. takes the largest exponent E among the 32 products and the accumulator;
3. cuts every product and the accumulator, toward zero, to a multiple of 2^(E − 13);
4. adds them exactly, then cuts the sum, toward zero, to 13 bits after its own leading bit. That is
   the new accumulator: 14 significant bits in an FP32 register. A sum of zero is +0.

Fast accumulation runs this over all of K. Split accumulation starts afresh every 128 of K and adds
the partial sums in FP32, rounded to nearest even, from +0 in the order of K: cuBLAS without
CUBLASLT_MATMUL_DESC_FAST_ACCUM, which Transformer Engine calls `use_split_accumulator`, and
DeepSeek-V3's promotion, which applies its scales to each partial sum first. What cuBLAS does on
top of that when it splits K over thread blocks is not modelled. Where a term is infinite or NaN,
the result is that of IEEE arithmetic.

Sources: DeepSeek-V3 technical report, section 3.3.2 (about 14 bits, promotion every 128); Khattak
and Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004 (alignment, truncation and
normalisation); PyPI's `mmaemu` 0.1.0, whose authors report bit-equality with cuBLAS on an H100 PCIe
(there the accumulator takes part in the alignment, and promotion is every 128). The tests hold this
file to mmaemu, not to a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8train.precision.formats import Format
from fp8train.precision.kernels.compiled import addressable, compiled, pointer

STEP = 32  # k of one instruction
FRACTION_BITS = 13
PROMOTE = 128  # k between two promotions to FP32
LEAST = 2.0**-64  # below every term: keeps 1 / top finite where all of them are zero
CHUNK = 2**22  # products held at once by the torch form


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where it can't be built (said once in the log)."""
    return compiled(Path(__file__).with_suffix(".cpp"))


def gemm(a: Tensor, b: Tensor, formats: tuple[Format, Format], *, promote: int | None) -> Tensor:
    """a · b in FP32 as the tensor core sums it.

    Args:
        a: [M, K], values of formats[0] in BF16 or FP32, any strides.
        b: [K, N], values of formats[1] likewise.
        formats: of a and b. They decide the exponent of subnormal values, and so the bits cut.
        promote: None for fast accumulation, 128 for split accumulation.
    Returns:
        FP32 [M, N].
    Raises:
        ValueError: the shapes don't fit, or promote is below 1.
    """
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for partial in partials(a, b, formats, promote):
        total += partial
    return total


def partials(
    a: Tensor, b: Tensor, formats: tuple[Format, Format], every: int | None = PROMOTE
) -> Iterator[Tensor]:
    """The accumulator at each promotion: FP32 [M, N] for every `every` of K, the last may be short.

    Their FP32 sum in this order is the GEMM; a block-scaled one multiplies each by its scales
    first. Arguments as for `gemm`; `every` None gives one for all of K.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a [M, K] and b [K, N] don't fit: {tuple(a.shape)}, {tuple(b.shape)}")
    depth = a.shape[1]
    if every is None:
        every = max(depth, 1)
    if every < 1:
        raise ValueError(f"a promotion every {every} of K: give None or a positive number")
    for k in range(0, depth, every):
        yield _partial(a[:, k : k + every], b[k : k + every], formats)


def _partial(a: Tensor, b: Tensor, formats: tuple[Format, Format]) -> Tensor:
    """One accumulator over all of a's columns, from zero."""
    left, right = _Side.of(a, formats[0]), _Side.of(b, formats[1])
    if addressable(left.values) and addressable(right.values) and library() is not None:
        total = chain_compiled(left, right)
    else:
        total = chain(left, right)
    if left.finite and right.finite:
        return total
    special = _special(a.float(), b.float())
    return torch.where(special.isfinite(), total, special)


@dataclass
class _Side:
    """An operand as the sums want it, FP32 and contiguous.

    Attributes:
        values: Inf and NaN are 0 here.
        powers: 2^exponent of each value, 0 for 0.
        finite: whether nothing had to be replaced.
    """

    values: Tensor
    powers: Tensor
    finite: bool

    @classmethod
    def of(cls, x: Tensor, fmt: Format) -> _Side:
        x = x.detach().float().contiguous()
        finite = x.isfinite()
        all_finite = bool(finite.all())
        values = x if all_finite else torch.where(finite, x, 0.0)
        powers = power_of_two(values).clamp(min=2.0**fmt.min_exponent)
        return cls(values, torch.where(values == 0, 0.0, powers), all_finite)


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above |x|, FP32; 0 for 0."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def chain(a: _Side, b: _Side) -> Tensor:
    """The accumulator in torch operations, on any device; FP32 [M, N].

    Each operation on floats is exact: products have 8 bits, scaling is by powers of two, and the
    sums are of integers below 2^22.
    """
    (m, k), n = a.values.shape, b.values.shape[1]
    out = a.values.new_zeros(m, n)
    up, kept = 2.0**FRACTION_BITS, -(1 << 23 - FRACTION_BITS)
    rows = max(1, CHUNK // (STEP * max(n, 1)))
    for row in range(0, m, rows):
        values, powers = (x[row : row + rows, :, None] for x in (a.values, a.powers))
        total = out[row : row + rows]
        for column in range(0, k, STEP):
            step = slice(column, column + STEP)
            top = (powers[:, step] * b.powers[step]).amax(1)
            scale = up / torch.maximum(top, power_of_two(total)).clamp(min=LEAST)
            terms = values[:, step] * b.values[step] * scale[:, None]
            added = terms.trunc_().sum(1) + (total * scale).trunc_()
            cut = (added.view(torch.int32) & kept).view(torch.float32)
            total.copy_(cut / scale)
    return out


def chain_compiled(a: _Side, b: _Side) -> Tensor:
    """The same by hopper.cpp."""
    loaded = library()
    assert loaded is not None, "no compiler: take chain()"
    (m, k), n = a.values.shape, b.values.shape[1]
    out = torch.empty(m, n, dtype=torch.float32)
    loaded.hopper_chain(
        *(pointer(tensor) for tensor in (a.values, a.powers, b.values, b.powers, out)),
        *(ctypes.c_int64(size) for size in (m, n, k)),
    )
    return out


def _special(a: Tensor, b: Tensor) -> Tensor:
    """FP32 [M, N]: Inf or NaN where IEEE's sum of the products is, something finite elsewhere."""
    total = a.new_zeros(a.shape[0], b.shape[1])
    infinite = a.isinf().any(0) | b.isinf().any(1)
    for k in infinite.nonzero().flatten().tolist():
        total += a[:, k, None] * b[k]
    total[a.isnan().any(1)] = torch.nan
    total[:, b.isnan().any(0)] = torch.nan
    return total
