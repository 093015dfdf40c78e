"""A quantised linear's weight that travels as bytes: the ranks that own its rows round, scale and
cast them, and the layer uses the payload as it arrives.

The scales are those of the whole weight, so the payload is bit-equal to gathering BF16 and
quantising after. That takes one eight-bit copy that serves fprop and dgrad, with few scales
(`Recipe.weight_travels_as_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8train.precision.formats import Format, decode
from fp8train.precision.kernels import wire_kernels
from fp8train.precision.quantize import Payload, apply_scales, block_amax, folds
from fp8train.precision.quantizers import Delayed, Scaled
from fp8train.precision.scaling import Scales
from fp8train.precision.tensor import Granularity, QuantizedTensor, spread


@dataclass
class WeightBytes:
    """One layer's weight [N, K], of which this rank owns some rows.

    Attributes:
        quantizer: of the layer's weight.
        shape: N and K.
        first_row: of this rank's.
        amax: FP32, one for each block of the whole weight, all ranks' together.
        scales: of the same blocks.
        arrived: uint8 [N, K], what was gathered last.
    """

    quantizer: Scaled | Delayed
    shape: tuple[int, int]
    first_row: int
    amax: Tensor | None = None
    scales: Scales | None = None
    arrived: Tensor | None = None

    @property
    def fmt(self) -> Format:
        fmt = self.quantizer.recipe.formats.weight.rowwise
        assert fmt is not None
        return fmt

    @property
    def granularity(self) -> Granularity:
        return self.quantizer.recipe.granularity("weight")[0]

    def own_amaxes(self, rows: Tensor) -> Tensor:
        """The amaxes of all blocks as far as these BF16 rows [n, K] know them, 0 for the others."""
        grid = self.granularity.grid(*self.shape)
        amaxes = torch.zeros(grid, device=rows.device)
        if len(rows):
            lead, first = self._lead()
            found = block_amax(F.pad(rows, (0, 0, lead, 0)), self.granularity)
            amaxes[first : first + len(found)] = found
        return amaxes

    def cast(self, rows: Tensor) -> Tensor:
        """These BF16 rows as bytes, with scales of `amax`; uint8 [n, K]."""
        assert self.amax is not None
        self.scales = self.quantizer.weight_scales(self.amax)
        if not len(rows):
            return rows.to(torch.uint8)
        lead, first = self._lead()
        padded = F.pad(rows, (0, 0, lead, 0))
        count = self.granularity.grid(*padded.shape)[0]
        scales = Scales(*(each[first : first + count].contiguous() for each in self.scales))
        # The kernels for a CPU write BF16, where every value is exact.
        payload = Payload(torch.bfloat16 if rows.device.type == "cpu" else None)
        quantized = apply_scales(padded, scales, self.fmt, self.granularity, payload).payload[lead:]
        return quantized.to(self.fmt.dtype).view(torch.uint8)

    def _lead(self) -> tuple[int, int]:
        """Rows of the first block that other ranks own, and that block's number."""
        height = self.granularity.block(*self.shape)[0]
        return self.first_row % height, self.first_row // height

    def operand(self, *, training: bool) -> QuantizedTensor:
        """What arrived, as the layer's quantiser makes it of the weight itself."""
        assert self.arrived is not None and self.scales is not None and self.amax is not None
        quantizer, fmt, granularity = self.quantizer, self.fmt, self.granularity
        if training:
            quantizer.note_amax(self.amax)
        payload, scale_inv = quantizer.payload, self.scales.scale_inv
        dtype = payload.dtype_of(fmt)
        if dtype == fmt.dtype:
            return QuantizedTensor(self.arrived.view(dtype), scale_inv, fmt, granularity)
        fold = folds(payload, fmt, granularity, quantizer.recipe.rule, scale_inv)
        values = decoded(self.arrived, fmt)
        if fold:
            values = values * spread(scale_inv, granularity, *self.shape)
        return QuantizedTensor(values.to(dtype), scale_inv, fmt, granularity, folded=fold)


def decoded(stored: Tensor, fmt: Format) -> Tensor:
    """The FP32 values of bytes [N, K], by a kernel where torch would take three times as long."""
    if not wire_kernels.usable(stored):
        return decode(stored, fmt)
    values = torch.empty(stored.shape)
    wire_kernels.decode_into(values, stored, 0, fmt, add=False)
    return values
