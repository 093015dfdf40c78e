"""What quantisation does to each layer's input, weight and output gradient, at sampled steps.

A sampled step looks at the first micro batch: the first time that each role of each layer is
quantised, so that accumulation, cached weights and recomputation count nothing twice. Sums over
all elements and ranks become the statistics; nothing that training computes with is touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from fp8train.precision.linear import Numerics
from fp8train.precision.quantizers import Operand
from fp8train.precision.recipes import ROLES
from fp8train.precision.scaling import floor_to_power_of_two
from fp8train.precision.tensor import QuantizedTensor, spread

STATISTICS = ("amax", "scale", "saturated", "flushed", "snr_db", "kurtosis")
Statistics = dict[str, float | None]  # of one role of one layer; None where there is no number

PIECE = 2**22  # elements looked at together, which bounds the memory that it takes
PIECE_ROWS = 128  # a multiple of every block's rows
ROUNDING = 1 + 2.0**-20  # an amax can exceed max / scale by FP32's rounding, and is not cut off


class Telemetry:
    """Observes a model's quantised layers at step 1 and at every multiple of `every`.

    Args:
        numerics: of this rank's layers, by full name; the same ones in the same order on every
            rank of a group that shares samples.
        every: steps between samples; 0: never.
        device: where the layers run.
        elsewhere: other ranks have such layers, where this one may have none.
    """

    def __init__(
        self,
        numerics: dict[str, Numerics],
        every: int,
        device: torch.device,
        *,
        elsewhere: bool = False,
    ) -> None:
        self.numerics, self.every, self.device = numerics, every, device
        self.elsewhere = elsewhere
        self.sampling = False
        self.seen: dict[tuple[str, str], list[Piece]] = {}
        self.scratch = Scratch()

    @property
    def on(self) -> bool:
        """Whether there is anything to observe, ever."""
        return (bool(self.numerics) or self.elsewhere) and self.every > 0

    def due(self, step: int) -> bool:
        """Whether a step, counted from 1, is sampled."""
        return self.on and (step == 1 or step % self.every == 0)

    def begin_step(self, step: int) -> None:
        """Before the first forward of a step: observe if it is due."""
        self.seen, self.scratch, self.sampling = {}, Scratch(), self.due(step)
        if self.sampling:
            for layer, numerics in self.numerics.items():
                numerics.observer = partial(self._observe, layer)

    def end_step(self, group: dist.ProcessGroup | None = None) -> dict[str, Statistics] | None:
        """After the last backward of a step; every rank of the group calls it.

        Args:
            group: the ranks whose samples count together; None for this one alone.
        Returns:
            "LAYER.ROLE" → statistics, in model order, of what was quantised in these layers;
            None if the step was not sampled.
        """
        if not self.sampling:
            return None
        for numerics in self.numerics.values():
            numerics.observer = None
        keys = list(product(self.numerics, ROLES))
        found = [total(self.seen.get(key, [])) for key in keys]
        self.seen, self.scratch, self.sampling = {}, Scratch(), False
        if not keys:
            return {}
        rows = torch.tensor([astuple(sums) for sums in found], dtype=torch.float64)
        rows = share(rows.to(self.device), group)
        return {
            f"{layer}.{role}": statistics(Sums(*row))
            for (layer, role), row in zip(keys, rows.tolist(), strict=True)
            if Sums(*row).elements  # a weight that arrives as bytes was cast elsewhere
        }

    @torch.no_grad()
    def _observe(self, layer: str, role: str, x: Tensor, operand: Operand) -> None:
        if (layer, role) not in self.seen:
            self.seen[layer, role] = measure(x, operand, self.scratch)


def share(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`Sums` of all ranks, from rows of each: the maximum of the amaxes, the sum of the rest."""
    if group is None or dist.get_world_size(group) == 1:
        return rows
    amax, rest = rows[:, :1].contiguous(), rows[:, 1:].contiguous()
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(rest, group=group)
    return torch.cat((amax, rest), dim=1)


@dataclass
class Sums:
    """What the statistics are made of; all but the amax add up over pieces and ranks.

    Attributes:
        amax: max |x|.
        elements: their number, and how many of them are quantised.
        nonzero, nonzero_after: before and after quantisation.
        saturated: beyond the format's largest value.
        noise: Σ (x − x̂)².
        powers: Σ xᵏ for k = 1 to 4.
        blocks, log_scale: blocks with a scale, and the sum of log2 scale.
    """

    amax: float
    elements: float
    quantized: float
    nonzero: float
    nonzero_after: float
    saturated: float
    noise: float
    power1: float
    power2: float
    power3: float
    power4: float
    blocks: float
    log_scale: float


NOTHING = Sums(*[0.0] * len(fields(Sums)))


def statistics(sums: Sums) -> Statistics:
    """The numbers of one role of one layer; None for what is not finite or not defined.

    - amax: max |x|.
    - scale: what x is multiplied by before the cast; of blocks the geometric mean.
    - saturated: share of the elements whose magnitude, scaled, is beyond the format's max.
    - flushed: share of the elements other than 0 that became 0.
    - snr_db: 10 log10(Σx² / Σ(x − x̂)²), the signal-to-noise ratio; None without noise.
    - kurtosis: fourth standardised moment of x, 3 for a Gaussian.

    A role that stays in high precision has an amax and a kurtosis only.
    """
    elements, quantized = sums.elements, sums.quantized
    found: Statistics = {
        "amax": sums.amax if elements else None,
        "scale": _power_of_two(_ratio(sums.log_scale, sums.blocks)),
        "saturated": _ratio(sums.saturated, quantized),
        "flushed": _ratio(sums.nonzero - sums.nonzero_after, sums.nonzero) if quantized else None,
        "snr_db": _decibels(_ratio(sums.power2, sums.noise)),
        "kurtosis": _kurtosis(sums),
    }
    return {name: _six_digits(value) for name, value in found.items()}


def _six_digits(value: float | None) -> float | None:
    """JSON has no NaN and no infinity, and a statistic needs no more digits."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _power_of_two(exponent: float | None) -> float | None:
    return None if exponent is None or not math.isfinite(exponent) else 2.0**exponent


def _decibels(ratio: float | None) -> float | None:
    return 10 * math.log10(ratio) if ratio is not None and ratio > 0 else None


def _kurtosis(sums: Sums) -> float | None:
    """Central moments from those about 0, in FP64; None where all elements are (nearly) equal."""
    if not sums.elements:
        return None
    mean, second, third, fourth = (
        power / sums.elements for power in (sums.power1, sums.power2, sums.power3, sums.power4)
    )
    variance = second - mean**2
    if not variance > 1e-12 * second:
        return None
    central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
    return central / variance**2


# What is computed on the device for some rows of x, in this order; moments are about the mean, and
# moments and noise in powers of a unit.
PIECE_VALUES = (
    *("amax", "unit", "mean", "second", "third", "fourth", "nonzero"),
    *("nonzero_after", "saturated", "noise", "blocks", "log_scale"),
)


@dataclass
class Piece:
    """Some rows of x: how many elements, whether quantised, and `PIECE_VALUES` on the device."""

    elements: int
    quantized: bool
    values: Tensor


class Scratch:
    """Memory for FP32 results, used again and again: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.memory = torch.empty(3, 0)

    def take(self, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Three tensors of a shape, with any content; the last three are no longer good."""
        size = shape.numel()
        if self.memory.shape[1] < size or self.memory.device != device:
            self.memory = torch.empty(3, size, device=device)
        first, second, third = (row[:size].view(shape) for row in self.memory)
        return first, second, third


def measure(x: Tensor, operand: Operand, scratch: Scratch) -> list[Piece]:
    """Look at x and what became of it; waits for no GPU.

    Args:
        x: BF16 or FP32 [rows, columns].
        operand: its row-wise copy.
    """
    return [
        Piece(part.numel(), isinstance(became, QuantizedTensor), _values(part, became, scratch))
        for part, became in _parts(x, operand)
    ]


def _parts(x: Tensor, operand: Operand) -> Iterator[tuple[Tensor, Operand]]:
    """Rows of x, some at a time, and the same rows of the operand."""
    if x.numel() == 0:
        return
    step = max(1, PIECE // (x.shape[1] * PIECE_ROWS)) * PIECE_ROWS
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        if not isinstance(operand, QuantizedTensor):
            yield x[rows], operand[rows]
            continue
        scale_inv, height = operand.scale_inv, operand.granularity.rows
        if height is not None:
            scale_inv = scale_inv[first // height : -(-(first + step) // height)]
        yield x[rows], replace(operand, payload=operand.payload[rows], scale_inv=scale_inv)


def _values(x: Tensor, operand: Operand, scratch: Scratch) -> Tensor:
    """`PIECE_VALUES` as an FP64 tensor.

    Powers of small gradients would leave FP32's range, so all is divided by a power of two near
    the amax first, which is exact.
    """
    y, other, another = scratch.take(x.shape, x.device)
    least, most = x.aminmax()
    amax = torch.maximum(-least, most).float()
    unit = floor_to_power_of_two(amax.nan_to_num(1.0).clamp(2.0**-126, 2.0**126))
    y.copy_(x).mul_(unit.reciprocal())
    mean = y.mean()
    deviation = torch.sub(y, mean, out=other).view(-1)
    square = torch.mul(other, other, out=another).view(-1)
    values = [amax, unit, mean, square.sum(), square.dot(deviation), square.dot(square)]
    if isinstance(operand, QuantizedTensor):
        values += [x.count_nonzero(), *_losses(y, unit, operand, other, another)]
    else:
        values += [torch.zeros_like(amax)] * (len(PIECE_VALUES) - len(values))
    return torch.stack([value.double() for value in values])


def _losses(
    y: Tensor, unit: Tensor, operand: QuantizedTensor, other: Tensor, another: Tensor
) -> list[Tensor]:
    """What quantisation lost of y = x / unit; `other` and `another` are free to write to."""
    scale_inv = operand.scale_inv
    if operand.tensor_scale_inv is not None:
        scale_inv = scale_inv * operand.tensor_scale_inv
    scale_inv_y = scale_inv / unit
    # A scale_inv of 0 stands for a block whose values are flushed, whatever its payload is.
    limit = torch.where(scale_inv > 0, scale_inv_y * (operand.fmt.max * ROUNDING), torch.inf)
    over = torch.abs(y, out=other) > spread(limit, operand.granularity, *y.shape)
    after = another.copy_(operand.payload)
    if not operand.folded:
        after.mul_(spread(scale_inv_y, operand.granularity, *y.shape))
    else:
        after.mul_((operand.tensor_scale_inv if operand.tensor_scale_inv is not None else 1) / unit)
    nonzero_after = after.count_nonzero()
    error = after.sub_(y).view(-1)
    logs = -scale_inv.double().log2()
    has_scale = logs.isfinite()
    return [
        nonzero_after,
        over.count_nonzero(),
        error.dot(error),
        has_scale.count_nonzero(),
        torch.where(has_scale, logs, 0.0).sum(),
    ]


def total(pieces: list[Piece]) -> Sums:
    """The sums of a role's pieces, in FP64; zeros where it was not seen."""
    if not pieces:
        return NOTHING
    rows = torch.stack([piece.values for piece in pieces]).tolist()
    found = [_sums(piece, *row) for piece, row in zip(pieces, rows, strict=True)]
    added = [sum(values) for values in zip(*map(astuple, found), strict=True)]
    return replace(Sums(*added), amax=max(sums.amax for sums in found))


def _sums(
    piece: Piece,
    amax: float,
    unit: float,
    mean: float,
    second: float,
    third: float,
    fourth: float,
    nonzero: float,
    nonzero_after: float,
    saturated: float,
    noise: float,
    blocks: float,
    log_scale: float,
) -> Sums:
    """Moments about the mean become sums of powers, which add up over pieces and ranks."""
    n, m = piece.elements, mean
    return Sums(
        amax=amax,
        elements=n,
        quantized=n if piece.quantized else 0,
        nonzero=nonzero,
        nonzero_after=nonzero_after,
        saturated=saturated,
        noise=noise * unit**2,
        power1=n * m * unit,
        power2=(second + n * m**2) * unit**2,
        power3=(third + 3 * m * second + n * m**3) * unit**3,
        power4=(fourth + 4 * m * third + 6 * m**2 * second + n * m**4) * unit**4,
        blocks=blocks,
        log_scale=log_scale,
    )
