"""The `torch` backend: values in their real eight bits, multiplied by torch's scaled GEMMs.

On a GPU those are cuBLAS's and CUTLASS's FP8 kernels, after Triton casts; a CPU has such GEMMs for
one scale a tensor or a row, slow where it lacks the instructions: `emulated` is for CPUs.

The kernels want both operands as [rows of the output, K] with K contiguous, so an operand that is
reduced over its rows is transposed on the way, in eight bits, unless its cast stored it so already.
Sizes that they don't take are padded with zeros. Fast accumulation is allowed in fprop only. Blocks
of 32 and 16 have their scales in cuBLAS's tiles of 128×4. A GEMM with an operand in high precision
runs in BF16.

Sources: torch `aten/src/ATen/native/cuda/ScaledBlas.cpp` (which scalings, layouts, types); cuBLAS
documentation, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8train.config import ConfigError
from fp8train.precision.backends.emulated import Emulated
from fp8train.precision.formats import E2M1, E4M3, E5M2, Format, cast, e8m0_encode
from fp8train.precision.quantize import Payload
from fp8train.precision.quantizers import Operand
from fp8train.precision.recipes import OPERANDS, NVFP4Scaling, Recipe, RowwiseScaling
from fp8train.precision.tensor import QuantizedTensor

ALIGNMENT = 16  # of the output's sizes, and of K in bytes
TILE = (128, 4)  # of swizzled scales


class StoredPayload(Payload):
    """The format's own dtype; BF16 for E2M1, which is packed for the GEMM only."""

    def dtype_of(self, fmt: Format) -> torch.dtype:
        return fmt.dtype or torch.bfloat16


@dataclass(frozen=True)
class Packed:
    """One side of a GEMM as the kernel reads it, seen as [R, K].

    Attributes:
        values: FP8 [R, K], or two E2M1 a byte [R, K/2]; contiguous, padded.
        scales: of the values, and for E2M1 of the whole tensor.
        kinds: the `ScalingType` of each, by name.
        rows: R without padding.
    """

    values: Tensor
    scales: list[Tensor]
    kinds: list[str]
    rows: int

    @property
    def swizzles(self) -> list[str]:
        """The `SwizzleType` of each scale, by name."""
        tiled = ("BlockWise1x32", "BlockWise1x16")
        return ["SWIZZLE_32_4_4" if kind in tiled else "NO_SWIZZLE" for kind in self.kinds]

    def by_row(self) -> Packed:
        """The same with the tensor's one scale given to every row."""
        if self.kinds != ["TensorWise"]:
            return self
        scale = self.scales[0].expand(self.values.shape[0], 1).contiguous()
        return replace(self, scales=[scale], kinds=["RowWise"])


def pack(operand: QuantizedTensor, transposed: bool) -> Packed:
    """The operand as it is ([R, K]), or transposed ([K, R]).

    Its granularity, seen this way, is a tensor, a row, 1×128, 128×128, 1×32, 1×16 or 16×16.
    """
    values, scale = operand.payload, operand.scale_inv
    block = operand.granularity.rows, operand.granularity.columns
    if transposed:
        values, scale, block = values.t(), scale.t(), block[::-1]
    rows, depth = values.shape
    aligned = {128: 128, 32: 32, 16: 2 * ALIGNMENT}.get(block[1] or 0, ALIGNMENT)
    more_rows = -rows % (128 if block == (128, 128) else ALIGNMENT)
    more_depth = -depth % aligned
    if operand.fmt.dtype is not None:
        raw = values.view(torch.uint8)
        if more_depth or more_rows:  # padding by nothing would copy
            raw = F.pad(raw, (0, more_depth, 0, more_rows))
        stored = raw.contiguous().view(operand.fmt.dtype)
    else:
        codes = cast(F.pad(values, (0, more_depth, 0, more_rows)), operand.fmt)
        stored = codes.contiguous().view(torch.float4_e2m1fn_x2)

    def packed(kind: str, *scales: Tensor) -> Packed:
        kinds = [kind, *["TensorWise"] * (len(scales) - 1)]
        return Packed(stored, list(scales), kinds, rows)

    match block:
        case (None, None):
            return packed("TensorWise", scale.view(1, 1))
        case (1, None):
            column = F.pad(scale, (0, 0, 0, more_rows)).reshape(-1)
            return packed("RowWise", column.view(-1, 1))  # strides 1, 1: the kernels look
        case (1, 128):  # [R, K/128], rows next to each other
            padded = F.pad(scale, (0, 0, 0, more_rows))
            return packed("BlockWise1x128", padded.t().contiguous().t())
        case (128, 128):  # [K/128 to a multiple of 4, R/128], K next to each other
            padded = F.pad(scale, (0, -scale.shape[1] % 4))
            return packed("BlockWise128x128", padded.contiguous().t())
        case (1, 32):
            tiles = swizzle(e8m0_encode(scale))
            return packed("BlockWise1x32", tiles.view(torch.float8_e8m0fnu))
        case (1 | 16 as height, 16):
            assert operand.tensor_scale_inv is not None
            each_row = scale.repeat_interleave(height, 0)[:rows]
            tiles = swizzle(cast(each_row, E4M3).view(torch.uint8))
            tensor_scale = operand.tensor_scale_inv.view(1)
            return packed("BlockWise1x16", tiles.view(torch.float8_e4m3fn), tensor_scale)
    raise AssertionError(f"no kernel for blocks of {block}: support.py should have refused")


def swizzle(scales: Tensor) -> Tensor:
    """One-byte scales [R, K-blocks] in cuBLAS's order, flat, padded with zeros to whole tiles.

    A tile holds 128 rows of 4 scales, 512 bytes: row r, scale c at 16·(r mod 32) + 4·(r div 32) +
    c. Tiles follow each other along K first.
    """
    down, across = (-size % tile for size, tile in zip(scales.shape, TILE, strict=True))
    padded = F.pad(scales, (0, across, 0, down))
    rows, columns = (size // tile for size, tile in zip(padded.shape, TILE, strict=True))
    return padded.reshape(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4).reshape(-1)


@dataclass(frozen=True)
class Call:
    """Arguments of one scaled GEMM, left · rightᵀ.

    Attributes:
        left, right: their rows are the output's rows and columns.
        dtype: of the output.
        fast: allows fast accumulation.
    """

    left: Packed
    right: Packed
    dtype: torch.dtype
    fast: bool

    @classmethod
    def of(cls, kind: str, a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Call:
        """For a GEMM of `Gemms`."""
        left, right = pack(a, kind == "wgrad"), pack(b, kind != "fprop")
        if "RowWise" in (*left.kinds, *right.kinds):
            left, right = left.by_row(), right.by_row()
        fast = kind == "fprop" and left.kinds[0] in ("TensorWise", "RowWise")
        return cls(left, right, dtype, fast)

    def run(self) -> Tensor:
        """The product, padding cut off."""
        return self.multiply()[: self.left.rows, : self.right.rows].contiguous()

    def multiply(self) -> Tensor:
        """The product of the operands as they are."""
        left, right = self.left, self.right
        if left.kinds[0] in ("TensorWise", "RowWise"):  # older than scaled_mm, on a CPU too
            return torch._scaled_mm(
                left.values,
                right.values.t(),
                left.scales[0],
                right.scales[0].t(),
                out_dtype=self.dtype,
                use_fast_accum=self.fast,
            )
        return F.scaled_mm(
            left.values,
            right.values.t(),
            left.scales,
            [getattr(F.ScalingType, kind) for kind in left.kinds],
            right.scales,
            [getattr(F.ScalingType, kind) for kind in right.kinds],
            [getattr(F.SwizzleType, name) for name in left.swizzles],
            [getattr(F.SwizzleType, name) for name in right.swizzles],
            output_dtype=self.dtype,
            use_fast_accum=self.fast,
        )


@dataclass(frozen=True)
class TorchGemms:
    """torch's scaled GEMMs.

    Attributes:
        plain: for GEMMs with an operand in high precision.
    """

    plain: Emulated

    @classmethod
    def on(cls, device: torch.device) -> TorchGemms:
        return cls(Emulated.on(device, "fast"))

    @property
    def payload(self) -> Payload:
        """How quantisers must hand values to `gemm`."""
        return StoredPayload(None)

    def gemm(self, kind: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """fprop a · bᵀ, dgrad a · b, wgrad aᵀ · b, in dtype."""
        if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
            return Call.of(kind, a, b, dtype).run()
        return self.plain.gemm(kind, folded(a), folded(b), dtype)


def folded(operand: Operand) -> Operand:
    """Small blocks with their scales multiplied in, which is exact in BF16, for one plain GEMM."""
    if isinstance(operand, Tensor):
        return operand
    if not {16, 32} & {operand.granularity.rows, operand.granularity.columns}:
        return operand
    values = operand.payload.float() * operand.expanded_scale_inv()
    return replace(operand, payload=values.bfloat16(), folded=True)


def check_formats(name: str, recipe: Recipe) -> None:
    """Refuse what no kernel multiplies, whatever the device.

    Raises:
        ConfigError: naming the GEMM.
    """
    wants = (E2M1,) if isinstance(recipe, NVFP4Scaling) else (E4M3, E5M2)
    for gemm, operands in OPERANDS.items():
        left, right = (getattr(recipe.formats.of(role), copy) for role, copy in operands)
        if left is None or right is None:
            continue
        why: Any = None
        if left not in wants or right not in wants:
            why = f"has {' and '.join(fmt.name for fmt in wants)} only"
        elif left == right == E5M2:
            why = "has no kernel for two E5M2 operands"
        elif isinstance(recipe, RowwiseScaling) and right == E5M2:
            why = "takes E5M2 with one scale a row as the left operand only"
        if why is not None:
            raise ConfigError(
                f"precision.backend=torch {why}, and {gemm} of {name} is {left.name}×{right.name}: "
                f"change precision.format or precision.formats, or use precision.backend=emulated"
            )
