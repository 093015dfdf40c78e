"""Call wire_kernels.cpp: eight-bit messages of gradients in one pass over memory.

Where `usable` says no, callers take the plain torch functions, which give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_int64
from pathlib import Path

import torch
from torch import Tensor

from fp8train.precision.formats import Format, decode
from fp8train.precision.kernels.compiled import addressable, compiled, pointer
from fp8train.precision.kernels.cpu_kernels import Draw, FormatFields


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they can't be built (said once in the log)."""
    return compiled(Path(__file__).with_suffix(".cpp"))


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels take these: contiguous, in the CPU's memory."""
    return all(map(addressable, tensors)) and library() is not None


def encode(x: Tensor, width: int, block: int, fmt: Format, draw: Draw | None) -> Tensor:
    """A message of `width` bytes a row of x, FP32 [N, S], usable; uint8 [N, width].

    Args:
        block: elements that share a scale; 0: no scales.
        draw: for stochastic rounding.
    """
    out = torch.empty(len(x), width, dtype=torch.uint8)
    _library().wire_encode(
        *(pointer(x), *map(c_int64, (*x.shape, block)), byref(FormatFields.of(fmt))),
        *(None if draw is None else byref(draw), pointer(out)),
    )
    return out


def decode_into(out: Tensor, message: Tensor, block: int, fmt: Format, *, add: bool) -> None:
    """Put a message's values in out, FP32 [S], usable, or add them to it."""
    _library().wire_decode(
        *(pointer(out), pointer(message), c_int64(out.numel()), c_int64(block)),
        *(pointer(_values(fmt)), add),
    )


@functools.cache
def _values(fmt: Format) -> Tensor:
    """What each byte stands for, FP32 [256]."""
    return decode(torch.arange(256, dtype=torch.uint8), fmt)


def _library() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "ask usable() first"
    return loaded
