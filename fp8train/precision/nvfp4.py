"""NVFP4: E2M1 values, an E4M3 scale for each block of 16, and an FP32 scale for the tensor.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); TE
`common/cast/nvfp4/core_nvfp4.cuh`. Names: S is the tensor's encoding scale, d a block's decoding
scale in E4M3, so that x ≈ q · d / S.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp8train.precision.formats import E2M1, E4M3, round_to_grid
from fp8train.precision.kernels import cpu_kernels
from fp8train.precision.quantize import Draw, Payload, block_amax, share_amax
from fp8train.precision.scaling import FLT_MAX, divide
from fp8train.precision.tensor import TENSOR, Granularity, QuantizedTensor, spread

SIZE = 16
# The signs in front of TE's Hadamard matrix: random once, the same for every tensor and step.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def quantize_nvfp4(
    x: Tensor,
    granularity: Granularity,
    payload: Payload,
    *,
    margin: int = 0,
    group: dist.ProcessGroup | None = None,
    draw: Draw | None = None,
) -> QuantizedTensor:
    """Quantise x to NVFP4 with scales from its own amaxes.

    Args:
        x: BF16 or FP32 [rows, columns].
        granularity: 1×16, 16×1 or 16×16.
        payload: its dtype must be given; a fold multiplies q by d, exact in BF16.
        margin: the tensor's amax is brought to 448·6·2^-margin.
        group: the ranks whose x share the tensor's scale, as parts of one matrix.
        draw: for stochastic rounding.
    """
    largest = E4M3.max * E2M1.max * 2.0**-margin
    amax = share_amax(block_amax(x, TENSOR), group).view(())
    encode = divide(largest, amax).clamp(max=FLT_MAX)
    encode = torch.where((amax == 0) | amax.isinf(), 1.0, encode)
    decode = divide(1.0, encode)
    sixth = torch.tensor(1.0, device=x.device) / torch.tensor(E2M1.max, device=x.device)
    fold = payload.fold != "never"
    if cpu_kernels.usable(x):
        ((q, d),) = cpu_kernels.quantize(
            *(x, E2M1, [granularity.block(*x.shape)]),
            cpu_kernels.Rule.of("nvfp4", (encode * sixth).item(), decode.item()),
            payload.dtype_of(E2M1),
            fold=fold,
            draw=None if draw is None else draw.numbers(x),
        )
        return QuantizedTensor(q, d, E2M1, granularity, decode, fold)
    d = round_to_grid(block_amax(x, granularity) * (encode * sixth), E4M3)
    scale = divide(1.0, d * decode).clamp(max=FLT_MAX)
    noise = None if draw is None else draw.noise(x)
    q = round_to_grid(x.float() * spread(scale, granularity, *x.shape), E2M1, noise)
    if fold:
        q = q * spread(d, granularity, *x.shape)
    return QuantizedTensor(q.to(payload.dtype_of(E2M1)), d, E2M1, granularity, decode, fold)


def hadamard(x: Tensor) -> Tensor:
    """The random Hadamard transform of each 16 rows of x [rows, columns], in x's dtype.

    Rows are padded with zeros to a multiple of 16. Orthogonal, so two operands that went through
    it give the same product over their rows. Added up in FP32 in a fixed order (a butterfly), then
    rounded once, so that every machine gives the same bits.
    """
    if cpu_kernels.usable(x):
        return cpu_kernels.hadamard(x, SIGNS)
    rows, columns = x.shape
    parts = -(-rows // SIZE)
    padded = F.pad(x.float(), (0, 0, 0, -rows % SIZE)).view(parts, SIZE, columns)
    values = padded * torch.tensor(SIGNS, dtype=torch.float32, device=x.device)[:, None]
    for span in (1, 2, 4, 8):
        pairs = values.view(parts, SIZE // (2 * span), 2, span, columns)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        values = torch.stack((first + second, first - second), dim=2)
    return (values.reshape(parts * SIZE, columns) * SIZE**-0.5).to(x.dtype)
