"""Casts against ml_dtypes and the tables of the format specification, bit for bit."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp8train.precision.formats import E4M3, E5M2, Format, cast, round_to_grid

ORACLE = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def oracle_bytes(x: np.ndarray, fmt: Format) -> np.ndarray:
    """The clamped cast by ml_dtypes."""
    with np.errstate(invalid="ignore"):  # NaN
        return np.clip(x, -fmt.max, fmt.max).astype(ORACLE[fmt.name]).view(np.uint8)


def same(ours: np.ndarray, theirs: np.ndarray, x: np.ndarray) -> None:
    """Equal bytes, where x is not NaN; there, some NaN."""
    nan = np.isnan(x)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])


@pytest.mark.parametrize(
    "value, byte",
    [
        *[(448, 0x7E), (464, 0x7E), (1e9, 0x7E), (-0.0, 0x80), (17, 0x58), (19, 0x5A)],
        *[(2**-10, 0), (2**-9, 1), (1.5 * 2**-9, 2), (2.5 * 2**-9, 2), (2**-6, 8)],
        *[(1.0625, 0x38), (1.1875, 0x3A), (math.inf, 0x7E), (-math.inf, 0xFE)],
    ],
)
def test_e4m3_table(value: float, byte: int) -> None:
    assert cast(torch.tensor(value), E4M3).view(torch.uint8).item() == byte


@pytest.mark.parametrize(
    "value, byte",
    [
        *[(57344, 0x7B), (61440, 0x7B), (65536, 0x7B), (math.inf, 0x7B), (2**-17, 0)],
        *[(2**-16, 1), (2**-14, 4), (1.125, 0x3C), (1.375, 0x3E), (-math.inf, 0xFB)],
    ],
)
def test_e5m2_table(value: float, byte: int) -> None:
    assert cast(torch.tensor(value), E5M2).view(torch.uint8).item() == byte


@FORMATS
def test_every_bf16_value(fmt: Format) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    ours = cast(x, fmt).view(torch.uint8).numpy()
    same(ours, oracle_bytes(x.numpy(), fmt), x.numpy())
    nan = x.isnan()
    assert cast(x, fmt).float()[nan].isnan().all()
    assert round_to_grid(x, fmt)[nan].isnan().all()
    grid, decoded = round_to_grid(x, fmt)[~nan], cast(x, fmt).float()[~nan]
    assert torch.equal(grid.view(torch.int32), decoded.view(torch.int32))  # −0 too


@FORMATS
def test_random_fp32_bits(fmt: Format) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 10**6, dtype=np.uint32)
    x = bits.view(np.float32)
    tensor = torch.from_numpy(x.copy())
    same(cast(tensor, fmt).view(torch.uint8).numpy(), oracle_bytes(x, fmt), x)
    grid, decoded = round_to_grid(tensor, fmt), cast(tensor, fmt).float()
    assert torch.equal(grid.nan_to_num(7.7), decoded.nan_to_num(7.7))


@FORMATS
@given(hnp.arrays(np.float32, (64,), elements=st.floats(width=32)))
def test_any_values(fmt: Format, x: np.ndarray) -> None:
    grid = round_to_grid(torch.from_numpy(x.copy()), fmt).numpy()
    np.testing.assert_array_equal(grid, oracle_bytes(x, fmt).view(ORACLE[fmt.name]).astype("f4"))


@FORMATS
def test_grid_values_are_exact_in_bf16(fmt: Format) -> None:
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype).float()
    values = values[values.isfinite()]
    assert torch.equal(values.bfloat16().float(), values)
    assert torch.equal(round_to_grid(values, fmt), values)
