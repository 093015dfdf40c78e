"""Eight-bit messages of gradients on a CUDA GPU, by Triton: cast in one pass over memory, and all
ranks' messages added up in another.

With scales for blocks, rounded to nearest; callers take the plain torch functions for the rest,
which give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8train.precision.formats import Format
from fp8train.precision.kernels.triton_casts import Launch, available

BLOCK = 128  # elements that share a scale
GROUP = 16  # blocks of a program
WARPS = 4
DEVICE_CODE = "triton_wire_kernels"


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels take these: contiguous, not empty, on a CUDA GPU."""
    fit = all(each.is_cuda and each.is_contiguous() and each.numel() > 0 for each in tensors)
    return fit and available()


def encode(x: Tensor, width: int, fmt: Format) -> Tensor:
    """A message of `width` bytes a row of x, FP32 [N, S], usable; uint8 [N, width]."""
    out = x.new_empty(len(x), width, dtype=torch.uint8)
    encode_launch(x, out, fmt).run()
    return out


def add(total: Tensor, messages: Tensor, fmt: Format) -> None:
    """Add the values of messages, uint8 [N, W], usable, to total, FP32 [S], in their order."""
    add_launch(total, messages, fmt).run()


def encode_launch(x: Tensor, out: Tensor, fmt: Format) -> Launch:
    """The launch that writes messages."""
    arguments = {"x": x, "size": x.shape[1], "width": out.shape[1], "out": out, "MAX": fmt.max}
    return _launch("encode_blocks", x.shape[1], len(x), arguments, fmt)


def add_launch(total: Tensor, messages: Tensor, fmt: Format) -> Launch:
    """The launch that adds messages."""
    count, width = messages.shape
    arguments = {
        **{"total": total, "size": len(total)},
        **{"messages": messages, "count": count, "width": width},
        **{"LARGEST": largest_code(fmt), "HAS_INFINITY": largest_code(fmt) < 0x7E},
    }
    return _launch("add_blocks", len(total), 1, arguments, fmt)


def largest_code(fmt: Format) -> int:
    """The byte of an eight-bit format's largest finite value."""
    return int(torch.tensor([fmt.max]).to(fmt.dtype).view(torch.uint8))


def _launch(kernel: str, size: int, rows: int, arguments: dict[str, Any], fmt: Format) -> Launch:
    about = {"MANTISSA_BITS": fmt.mantissa_bits, "MIN_EXPONENT": fmt.min_exponent}
    tile = {"GROUP": GROUP, "BLOCK": BLOCK}
    grid = (-(-size // (GROUP * BLOCK)), rows)
    return Launch(kernel, grid, WARPS, {**arguments, **about, **tile}, DEVICE_CODE)
