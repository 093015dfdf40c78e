"""Casts against ml_dtypes and the tables of the format specifications, bit for bit."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fp8train.precision.formats import (
    BY_NAME,
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0_NAN,
    Format,
    cast,
    decode,
    e8m0_decode,
    e8m0_encode,
    round_to_grid,
)
from fp8train.precision.philox import draws, key_of

ORACLE = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
FORMATS = pytest.mark.parametrize("fmt", BY_NAME.values(), ids=BY_NAME)


def every_bf16() -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


def random_fp32() -> Tensor:
    bits = np.random.default_rng(0).integers(0, 2**32, 10**6, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def oracle(x: Tensor, fmt: Format) -> np.ndarray:
    """The clamped cast by ml_dtypes, in its own dtype."""
    with np.errstate(invalid="ignore"):  # NaN
        return np.clip(x.numpy(), -fmt.max, fmt.max).astype(ORACLE[fmt.name])


def codes(stored: Tensor, fmt: Format) -> Tensor:
    """uint8, one code an element."""
    stored = stored.view(torch.uint8)
    if fmt.bits == 8:
        return stored
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)


def every_code(fmt: Format) -> Tensor:
    """Each of an eight-bit format's codes; of E2M1, each pair of them. uint8 [256]"""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8)


def grid_of(fmt: Format) -> Tensor:
    """The finite values, ascending, each once (one zero). FP32"""
    values = decode(every_code(fmt), fmt)
    return values[values.isfinite()].unique()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal FP32 values, −0 and +0 told apart."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize(
    "fmt, largest, normal, smallest",
    [
        (E4M3, 448, 2**-6, 2**-9),
        (E5M2, 57344, 2**-14, 2**-16),
        (E4M3FNUZ, 240, 2**-7, 2**-10),
        (E5M2FNUZ, 57344, 2**-15, 2**-17),
        (E2M1, 6, 1, 0.5),
    ],
    ids=BY_NAME,
)
def test_limits(fmt: Format, largest: float, normal: float, smallest: float) -> None:
    assert (fmt.max, 2.0**fmt.min_exponent, fmt.smallest) == (largest, normal, smallest)
    info = ml_dtypes.finfo(ORACLE[fmt.name])
    assert (fmt.max, 2.0**fmt.min_exponent) == (float(info.max), float(info.smallest_normal))
    assert fmt.smallest == float(info.smallest_subnormal)
    assert fmt.bits == info.bits
    grid = grid_of(fmt)
    assert (grid.max(), grid[grid > 0].min()) == (largest, smallest)


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


@pytest.mark.parametrize(
    "fmt, value, byte",
    [
        *[(E4M3FNUZ, 240, 0x7F), (E4M3FNUZ, math.inf, 0x7F), (E4M3FNUZ, -math.inf, 0xFF)],
        *[(E4M3FNUZ, 2**-10, 1), (E4M3FNUZ, 2**-11, 0), (E4M3FNUZ, 2**-7, 8), (E4M3FNUZ, 1, 0x40)],
        *[(E4M3FNUZ, -0.0, 0), (E4M3FNUZ, -(2**-11), 0), (E4M3FNUZ, math.nan, 0x80)],
        *[(E5M2FNUZ, 57344, 0x7F), (E5M2FNUZ, math.inf, 0x7F), (E5M2FNUZ, 2**-17, 1)],
        *[(E5M2FNUZ, 2**-15, 4), (E5M2FNUZ, 1, 0x40), (E5M2FNUZ, -0.0, 0)],
        *[(E5M2FNUZ, -(2**-18), 0), (E5M2FNUZ, math.nan, 0x80)],
    ],
)
def test_fnuz_tables(fmt: Format, value: float, byte: int) -> None:
    assert cast(torch.tensor(value), fmt).view(torch.uint8).item() == byte


@pytest.mark.parametrize(
    "value, rounded",
    [
        *[(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)],
        *[(0.26, 0.5), (5.01, 6), (7, 6), (math.inf, 6), (0.24, 0)],
    ],
)
def test_e2m1_table(value: float, rounded: float) -> None:
    pair, expected = (torch.tensor([float(y), -float(y)]) for y in (value, rounded))
    assert same_bits(decode(cast(pair, E2M1), E2M1), expected)
    assert same_bits(round_to_grid(pair, E2M1), expected)


def test_e2m1_bytes() -> None:
    """Two codes a byte, the first in the low bits; NaN is stored as 6."""
    x = torch.tensor([[0.0, 0.5, 1.0, 1.5], [-2.0, 3.0, -4.0, 6.0], [-0.0, math.nan, -6.0, 0.0]])
    stored = cast(x, E2M1)
    assert stored.dtype == torch.uint8
    assert stored.tolist() == [[0x10, 0x32], [0x5C, 0x7E], [0x78, 0x0F]]
    assert torch.equal(decode(stored.view(torch.float4_e2m1fn_x2), E2M1), decode(stored, E2M1))
    assert torch.equal(cast(x.t().contiguous().t(), E2M1), stored)
    assert cast(torch.empty(3, 0), E2M1).shape == decode(torch.empty(3, 0).byte(), E2M1).shape
    assert cast(-torch.full((2,), math.nan), E2M1).item() == 0x77


@pytest.mark.parametrize("shape", [(2, 5), (1,), ()])
def test_e2m1_refuses_an_odd_dimension(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"two values a byte.*\(.*\) must be even"):
        cast(torch.zeros(shape), E2M1)


@FORMATS
@pytest.mark.parametrize("values", [every_bf16, random_fp32])
def test_cast_and_grid_are_ml_dtypes(fmt: Format, values) -> None:
    x = values()
    nan = x.isnan()
    assert nan.any() and x.isinf().any() if values is every_bf16 else nan.any()
    expected = oracle(x, fmt)
    stored = cast(x, fmt)
    ours, theirs = codes(stored, fmt).numpy(), expected.view(np.uint8)
    np.testing.assert_array_equal(ours[~nan.numpy()], theirs[~nan.numpy()])
    decoded, grid = decode(stored, fmt), round_to_grid(x, fmt)
    assert grid.dtype == decoded.dtype == torch.float32
    assert same_bits(grid[~nan], torch.from_numpy(expected.astype(np.float32))[~nan])
    assert same_bits(decoded[~nan], grid[~nan])
    assert grid[nan].isnan().all()
    assert (decoded[nan] == 6).all() if fmt is E2M1 else decoded[nan].isnan().all()


@FORMATS
@given(hnp.arrays(np.float32, (64,), elements=st.floats(width=32)))
def test_any_values(fmt: Format, x: np.ndarray) -> None:
    tensor = torch.from_numpy(x.copy())
    expected = oracle(tensor, fmt).astype(np.float32)
    expected[np.isnan(x)] = np.nan  # E2M1's has none
    np.testing.assert_array_equal(round_to_grid(tensor, fmt).numpy(), expected)


@FORMATS
def test_every_code_comes_back(fmt: Format) -> None:
    stored = every_code(fmt)
    values = decode(stored, fmt)
    numbers = codes(stored, fmt).numpy().view(ORACLE[fmt.name]).astype(np.float32)
    np.testing.assert_array_equal(values.numpy(), numbers)
    again = codes(cast(values, fmt), fmt)
    finite = values.isfinite()  # Inf becomes max, NaN one of several
    assert torch.equal(again[finite], codes(stored, fmt)[finite])
    assert torch.equal(values.bfloat16().float()[finite], values[finite])
    assert same_bits(round_to_grid(values, fmt)[finite], values[finite])


def test_e8m0() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scale = e8m0_decode(every)
    theirs = every.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(scale.numpy(), theirs)
    assert [scale[i].item() for i in (0, 1, 127, 254)] == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert scale.dtype == torch.float32 and scale[E8M0_NAN].isnan()
    stored = e8m0_encode(scale)
    assert stored.dtype == torch.uint8 and torch.equal(stored, every)
    assert e8m0_encode(torch.tensor([math.nan, -math.nan])).tolist() == [255, 255]


def noise_for(x: Tensor, tick: int = 0) -> Tensor:
    return draws(key_of(0, "test"), tick, 64, x.numel() // 64).view(x.shape)


@FORMATS
@pytest.mark.parametrize("values", [every_bf16, random_fp32])
def test_stochastic_rounding_takes_a_neighbour(fmt: Format, values) -> None:
    x = values()
    rounded = round_to_grid(x, fmt, noise_for(x))
    nan = x.isnan()
    assert rounded[nan].isnan().all()
    rounded, clamped, grid = rounded[~nan], x[~nan].clamp(-fmt.max, fmt.max), grid_of(fmt)
    below = grid[torch.searchsorted(grid, clamped, right=True) - 1]
    above = grid[torch.searchsorted(grid, clamped)]
    assert ((rounded == below) | (rounded == above)).all()
    signs = clamped.signbit() if fmt.signed_zero else clamped.signbit() & (rounded != 0)
    assert torch.equal(rounded.signbit(), signs)


@FORMATS
@pytest.mark.parametrize("noise", [0, 2**23, 2**24 - 1])
def test_values_of_the_grid_stay(fmt: Format, noise: int) -> None:
    x = decode(every_code(fmt), fmt)
    kept = round_to_grid(x, fmt, torch.full(x.shape, noise, dtype=torch.int32))
    assert same_bits(kept[x.isfinite()], x[x.isfinite()])
    beyond = torch.tensor([math.inf, -math.inf, fmt.max * 1.01, -1e38])
    expected = torch.tensor([fmt.max, -fmt.max, fmt.max, -fmt.max])
    assert torch.equal(round_to_grid(beyond, fmt, torch.full((4,), noise)), expected)


@FORMATS
def test_stochastic_rounding_is_unbiased(fmt: Format) -> None:
    """The mean of 2^16 draws lies within 4 sigma of the value."""
    normal, small, top = 2.0**fmt.min_exponent, fmt.smallest, fmt.max
    below_top = grid_of(fmt)[-2].item()
    cases = [1.1 * normal, 2.7 * normal, 0.3 * small, (2**fmt.mantissa_bits - 0.35) * small]
    cases += [below_top + 0.9 * (top - below_top), 0.99 * small, 1.0001 * normal, 1e-3 * small]
    grid = grid_of(fmt)
    for tick, value in enumerate(torch.tensor([sign * y for y in cases for sign in (1, -1)])):
        above = torch.searchsorted(grid, value)
        quantum = (grid[above] - grid[above - 1]).item()
        x = value.expand(2**16)
        mean = round_to_grid(x, fmt, noise_for(x, tick)).double().mean().item()
        p = (value.item() - grid[above - 1].item()) / quantum
        assert abs(mean - value.item()) <= 4 * quantum * (p * (1 - p) / 2**16) ** 0.5


@pytest.mark.parametrize("value", [1.1, 1.999, 0.3 * 2**-9, 2**-9 * 1e-7, 2**-40, 3e-41, -300.123])
def test_how_many_draws_round_up(value: float) -> None:
    """Exactly the nearest share of the 2^24, found by bisection: once up, up for all below."""
    x = torch.tensor([value])
    magnitude = x.abs().item()
    quantum = 2.0 ** (max(math.floor(math.log2(magnitude)), -6) - 3)
    share = magnitude / quantum % 1 * 2**24

    def up(noise: int) -> bool:
        rounded = round_to_grid(x, E4M3, torch.tensor([noise])).abs().item()
        return rounded > magnitude

    low, high = 0, 2**24
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if up(middle) else (low, middle)
    assert abs(low - share) <= 0.5
    assert not up(2**24 - 1)


def test_stochastic_rounding_of_a_shard() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 33)
    whole = round_to_grid(x, E5M2, draws(5, 9, 12, 33))
    assert torch.equal(whole, round_to_grid(x, E5M2, draws(5, 9, 12, 33).long()))
    assert not torch.equal(whole, round_to_grid(x, E5M2, draws(5, 10, 12, 33)))
    noise = draws(5, 9, 4, 15, row_offset=3, column_offset=18)
    assert torch.equal(round_to_grid(x[3:7, 18:], E5M2, noise), whole[3:7, 18:])
