"""Signal to noise and underflow of each scaling, on the tensors of scripts/snr_table.py."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from fp8train.precision.formats import E4M3, E5M2, Format, round_to_grid
from fp8train.precision.quantize import tiles
from fp8train.precision.scaling import ScaleRule
from fp8train.precision.tensor import TENSOR, Granularity
from scripts.snr_table import (
    E8M0,
    FP32,
    POWER_OF_TWO,
    Loss,
    distributions,
    scaled,
    signal_to_noise,
)

VECTOR, SQUARE, MX = Granularity(1, 128), Granularity(128, 128), Granularity(1, 32)
GAUSSIAN, STUDENT, CHANNELS, ROWS, SWIGLU = names = (
    "Gaussian",
    "Student-t, 3 dof",
    "4 channels × 100",
    "row i × 2^-(i mod 21)",
    "SwiGLU, 4 channels aligned",
)

tensors = cache(distributions)


def quantized(name: str, fmt: Format, granularity: Granularity, rule: ScaleRule) -> Tensor:
    return scaled(fmt, granularity, rule)(tensors()[name]).dequantize()


def test_the_tensors_are_the_ones_meant() -> None:
    assert tuple(tensors()) == names
    assert {(x.shape, x.dtype) for x in tensors().values()} == {((1024, 4096), torch.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "per_tensor", "vector", "square", "mx"),  # dB in E4M3 and E5M2
    [
        (GAUSSIAN, (31.5, 25.6), (31.8, 25.8), (31.6, 25.6), (31.5, 25.5)),
        (STUDENT, (31.6, 25.6), (33.1, 27.1), (31.8, 25.8), (31.4, 25.5)),
        (CHANNELS, (31.5, 25.6), (42.0, 36.0), (31.8, 25.6), (31.6, 25.4)),
        (ROWS, (31.6, 25.6), (31.8, 25.8), (31.6, 25.6), (31.5, 25.5)),
    ],
)
def test_signal_to_noise(name: str, per_tensor, vector, square, mx) -> None:
    for index, fmt in enumerate((E4M3, E5M2)):
        for granularity, rule, expected in (
            (TENSOR, FP32, per_tensor),
            (VECTOR, FP32, vector),
            (SQUARE, FP32, square),
            (MX, E8M0, mx),
            (VECTOR, POWER_OF_TWO, (31.5, 25.5)),
            (SQUARE, POWER_OF_TWO, (31.5, 25.5)),
        ):
            found = signal_to_noise(tensors()[name], quantized(name, fmt, granularity, rule))
            about = (fmt.name, str(granularity), rule.kind)
            assert found == pytest.approx(expected[index], abs=0.3), about


def test_signal_to_noise_hides_underflow() -> None:
    x = tensors()[ROWS]
    whole = Loss.of(x, quantized(ROWS, E4M3, TENSOR, FP32))
    blocks = Loss.of(x, quantized(ROWS, E4M3, MX, E8M0))
    assert whole.flushed_fraction == pytest.approx(0.225, abs=0.005)
    assert blocks.flushed_fraction < 1e-4
    assert abs(whole.snr_db - blocks.snr_db) < 0.3
    assert whole.median_relative_error > 1.5 * blocks.median_relative_error


def rounded_down(x: Tensor, fmt: Format) -> Tensor:
    """x in MX blocks whose scale is 2^(⌊log2 amax⌋ − ⌊log2 max⌋), the OCP specification's rule:
    values above the format's largest saturate."""
    blocks = tiles(x, MX)
    exponent = blocks.abs().amax((1, 3), keepdim=True).log2().floor()
    exponent -= math.floor(math.log2(fmt.max))
    return (round_to_grid(blocks * (-exponent).exp2(), fmt) * exponent.exp2()).view(x.shape)


@pytest.mark.parametrize("name", [GAUSSIAN, STUDENT, CHANNELS, ROWS])
def test_rounding_mx_scales_down_would_cost_decibels(name: str) -> None:
    x = tensors()[name]
    up = signal_to_noise(x, quantized(name, E4M3, MX, E8M0))
    down = signal_to_noise(x, rounded_down(x, E4M3))
    assert 0.85 <= up - down <= 4.0
