"""The emulated backend: the recipe's numbers on any device, without FP8 hardware.

A GEMM's products are exact, sums are FP32, scales are applied in FP32, and the result is rounded
once to the output type (a BF16 GEMM on a CPU may round before the scale too: one ulp). FP8 values
are exact in BF16, so one BF16 GEMM does it where the CPU has fast ones (AVX-512 BF16, AMX);
elsewhere the same values go through an FP32 GEMM.

Power-of-two block scales are multiplied into the values, and the GEMM is still one. Where that is
not exact (FP32 block scales, values outside FP32's normal range) it is a sum over the blocks of
the reduction, each partial product scaled on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8train.precision.formats import Format
from fp8train.precision.kernels import hopper
from fp8train.precision.quantize import Payload
from fp8train.precision.quantizers import Operand
from fp8train.precision.scaling import FLT_MIN
from fp8train.precision.tensor import QuantizedTensor


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies BF16 matrices in hardware.

    Without it torch's CPU kernels for BF16 take up to a hundred times as long as those for FP32.
    """
    if device.type != "cpu":
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class Side:
    """One side of a GEMM, seen as [rows of the output, K]: values, and scales by row and K-block.

    Attributes:
        values: [R, K] in BF16 or FP32.
        scale_inv: FP32 [R or 1, K-blocks]; None for 1.
        block: values of K that share a column of scale_inv.
        factor: FP32 scalar over all; None for 1.
        blocked: scales belong to partial sums over blocks of K.
    """

    values: Tensor
    scale_inv: Tensor | None = None
    block: int = 0
    factor: Tensor | None = None
    blocked: bool = False

    @classmethod
    def of(cls, operand: Operand, transposed: bool) -> Side:
        """The operand as it is ([R, K]), or transposed ([K, R])."""
        if isinstance(operand, Tensor):
            return cls(operand.t() if transposed else operand)
        values, scale_inv, granularity = operand.payload, operand.scale_inv, operand.granularity
        rows, columns = granularity.block(*values.shape)
        if transposed:
            values, scale_inv, rows, columns = values.t(), scale_inv.t(), columns, rows
        if operand.folded:
            return cls(values, factor=operand.tensor_scale_inv)
        if scale_inv.shape[0] > 1:
            scale_inv = scale_inv.repeat_interleave(rows, 0)[: values.shape[0]]
        factor = operand.tensor_scale_inv
        return cls(values, scale_inv, columns, factor, granularity.is_block)

    def scale_of(self, start: int) -> Tensor | None:
        """FP32 [R or 1, 1]: the scales of the values of K from `start` on."""
        if self.scale_inv is None:
            return None
        index = start // self.block if self.blocked else 0
        return self.scale_inv[:, index : index + 1]


@dataclass(frozen=True)
class Emulated:
    """GEMMs over operands in `compute_dtype`: BF16 or FP32.

    Attributes:
        compute_dtype: of payloads and of plain operands.
        exact: values are multiplied by their scales before a GEMM only where that is exact.
        accumulate: "fp32", or "hopper" for the sums that an H100's tensor cores give.
    """

    compute_dtype: torch.dtype
    exact: bool = False
    accumulate: str = "fp32"

    @classmethod
    def on(cls, device: torch.device, emulation: str, accumulate: str = "fp32") -> Emulated:
        """The fast choice for the device; `exact` takes FP32 GEMMs in any case."""
        fast = emulation == "fast" and has_fast_bf16(device)
        dtype = torch.bfloat16 if fast else torch.float32
        return cls(dtype, emulation == "exact", accumulate)

    @property
    def payload(self) -> Payload:
        """How quantisers must hand values to `gemm`."""
        if self.accumulate == "hopper":
            return Payload(self.compute_dtype, "never")
        return Payload(self.compute_dtype, "exact" if self.exact else "always")

    def gemm(self, kind: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """fprop a · bᵀ, dgrad a · b, wgrad aᵀ · b, in dtype."""
        left, right = Side.of(a, kind == "wgrad"), Side.of(b, kind != "fprop")
        if (
            self.accumulate == "hopper"
            and isinstance(a, QuantizedTensor)
            and isinstance(b, QuantizedTensor)
        ):
            every = None if kind == "fprop" else hopper.PROMOTE
            return self._hopper(left, right, (a.fmt, b.fmt), every).to(dtype)
        if left.blocked or right.blocked:
            return self._by_blocks(left, right).to(dtype)
        return self._whole(left, right, dtype)

    def _whole(self, left: Side, right: Side, dtype: torch.dtype) -> Tensor:
        """One GEMM over all of K."""
        x, w = (side.values.to(self.compute_dtype) for side in (left, right))
        scales = _scales(left, right)
        on_cpu = x.device.type == "cpu"
        scalar = all(scale.numel() == 1 for scale in scales) and len(scales) <= 1
        if on_cpu and self.compute_dtype == dtype == torch.bfloat16 and scalar:
            # torch applies alpha to the FP32 accumulator, before its rounding to BF16.
            alpha = scales[0].item() if scales else 1.0
            return torch.addmm(x.new_zeros(1), x, w.t(), beta=0, alpha=alpha)
        if on_cpu or self.compute_dtype == torch.float32:
            product = x.float() @ w.float().t()  # torch's BF16 GEMM has no FP32 output there
        else:
            product = torch.mm(x, w.t(), out_dtype=torch.float32)
        return _times(product, scales).to(dtype)

    def _by_blocks(self, left: Side, right: Side) -> Tensor:
        """A sum over blocks of K: y + (P · s_left) · s_right in FP32, in order."""
        size = min(side.block for side in (left, right) if side.blocked)
        x, w = left.values.float(), right.values.float()
        y = x.new_zeros(x.shape[0], w.shape[0])
        for start in range(0, x.shape[1], size):
            part = slice(start, start + size)
            _add_scaled(y, x[:, part] @ w[:, part].t(), left, right, start)
        return _times(y, [side.factor for side in (left, right) if side.factor is not None])

    def _hopper(
        self, left: Side, right: Side, formats: tuple[Format, Format], every: int | None
    ) -> Tensor:
        """As an H100 sums: fast accumulation in fprop, split in dgrad, wgrad and block scaling."""
        x, w = left.values, right.values.t()
        if not (left.blocked or right.blocked):
            return _times(hopper.gemm(x, w, formats, promote=every), _scales(left, right))
        y = torch.zeros(x.shape[0], w.shape[1], device=x.device)
        for index, partial in enumerate(hopper.partials(x, w, formats)):
            _add_scaled(y, partial, left, right, index * hopper.PROMOTE)
        return y


def _scales(left: Side, right: Side) -> list[Tensor]:
    """The scales of a product without blocks, to be multiplied in order: a scalar that is the
    product of all scalars, as far as FP32 holds it, and those by row or column."""
    scalars = [side.factor for side in (left, right) if side.factor is not None]
    vectors = []
    for scale, by_row in ((left.scale_of(0), True), (right.scale_of(0), False)):
        if scale is not None and scale.numel() == 1:
            scalars.append(scale.view(()))
        elif scale is not None:
            vectors.append(scale if by_row else scale.t())
    merged: list[Tensor] = []
    for factor in scalars:
        if not merged:
            merged = [factor]
            continue
        both = merged[-1] * factor
        fits = both.isfinite() & (both.abs() >= FLT_MIN)
        # Without asking for the answer, which a GPU would have to wait for.
        merged[-1:] = [torch.where(fits, both, merged[-1]), torch.where(fits, 1.0, factor)]
    return [scale for scale in (*merged, *vectors) if not _is_one(scale)]


def _is_one(scale: Tensor) -> bool:
    """Whether a multiplication can be left out; asked on a CPU only, where it costs nothing."""
    return scale.device.type == "cpu" and scale.numel() == 1 and scale.item() == 1.0


def _times(product: Tensor, scales: list[Tensor]) -> Tensor:
    """The FP32 product, multiplied in place by its scales."""
    for scale in scales:
        product.mul_(scale)
    return product


def _add_scaled(y: Tensor, partial: Tensor, left: Side, right: Side, start: int) -> None:
    """y = fma(partial · s_left, s_right, y), for the block of K that begins at `start`.

    Source of the order: DeepGEMM's and cuBLAS's promotion on Hopper.
    """
    if (scale := left.scale_of(start)) is not None:
        partial.mul_(scale)
    if (scale := right.scale_of(start)) is None:
        y.add_(partial)
    else:  # FP64 holds the product exactly; its sum is rounded twice in about one of 2^29 cases
        y.copy_(torch.addcmul(y.double(), partial.double(), scale.t().double()))


class WideAttentionCore(nn.Module):
    """Causal attention computed in FP32 and rounded once, for CPUs without fast BF16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, Tq, K], k and v [B, G, Tk, K] → [B, H, Tq, K].

        The queries are the last Tq of the Tk positions. Where they are fewer, the mask is a tensor
        [Tq, Tk]: a CPU's kernels know no other that ends at the bottom right.
        """
        queries, keys = q.shape[2], k.shape[2]
        mask = None
        if queries != keys:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        out = F.scaled_dot_product_attention(
            q.float(),
            k.float(),
            v.float(),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.to(q.dtype)
