"""The scale formulas against the oracle table of NUMERICS, exact."""

import math
import struct

import numpy as np
import pytest
import torch

from fp8train.precision.delayed import DelayedState
from fp8train.precision.recipes import ALL_E4M3, DelayedScaling
from fp8train.precision.scaling import FLT_MAX, ScaleRule, amax, delayed_scale, scale_from_amax


def bits(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


TABLE = [  # amax, E4M3, E5M2, E4M3 power of two
    (0.0, 1.0, 1.0, 1.0),
    (math.inf, 1.0, 1.0, 1.0),
    (math.nan, 1.0, 1.0, 1.0),
    (1.0, 448.0, 57344.0, 256.0),
    (3.0, bits(0x43155555), bits(0x46955555), 128.0),
    (0.1, 4480.0, 573440.0, 4096.0),
    (448.0, 1.0, 128.0, 1.0),
    (FLT_MAX, bits(0x03E00001), bits(0x07600001), 2.0**-120),
    (1e-37, FLT_MAX, FLT_MAX, 2.0**127),
]


@pytest.mark.parametrize("value, e4m3, e5m2, power", TABLE)
def test_current_scale(value: float, e4m3: float, e5m2: float, power: float) -> None:
    x = torch.tensor(value)
    assert scale_from_amax(x, 448.0).item() == e4m3
    assert scale_from_amax(x, 57344.0).item() == e5m2
    assert scale_from_amax(x, 448.0, power_of_two=True).item() == power


def test_scale_inverse_is_a_rounded_reciprocal() -> None:
    assert scale_from_amax(torch.tensor(1.0), 448.0).reciprocal().item() == bits(0x3B124925)


def test_division_is_rounded_once() -> None:
    """torch's number / tensor is number · (1 / tensor), which is often one ulp off."""
    amaxes = np.random.default_rng(0).uniform(1e-3, 1e7, 10_000).astype(np.float32)
    expected = np.float32(448.0) / amaxes
    np.testing.assert_array_equal(scale_from_amax(torch.from_numpy(amaxes), 448.0), expected)


def test_block_scale_overflows_to_the_input_type() -> None:
    limit = torch.finfo(torch.bfloat16).max
    assert scale_from_amax(torch.tensor(1e-37), 448.0, overflow=limit).item() == limit


def test_margin() -> None:
    assert scale_from_amax(torch.tensor(1.0), 448.0, margin=2).item() == 112.0
    assert delayed_scale(torch.tensor(1.0), torch.tensor(5.0), 448.0, margin=2).item() == 112.0


def test_a_margin_can_t_push_a_scale_to_zero() -> None:
    for power_of_two in (False, True):
        scale = scale_from_amax(torch.tensor(3e38), 448.0, margin=32, power_of_two=power_of_two)
        assert scale.item() == torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_delayed_keeps_the_scale(value: float) -> None:
    assert delayed_scale(torch.tensor(value), torch.tensor(5.0), 448.0).item() == 5.0


def test_delayed_overflow() -> None:
    assert delayed_scale(torch.tensor(6.58e-37), torch.tensor(5.0), 448.0).item() == FLT_MAX


def test_amax_ignores_nan_and_sees_inf() -> None:
    assert amax(torch.tensor([1.0, -3.0, math.nan])).item() == 3.0
    assert amax(torch.tensor([1.0, -math.inf, math.nan])).item() == math.inf
    assert amax(torch.zeros(0)).item() == 0.0


# --- E8M0 ---------------------------------------------------------------------------------------

E8M0_E4M3 = [  # amax, biased exponent
    (0.0, 0),
    (2.0**-126, 0),
    (448 * 2.0**-126, 1),
    (0.875, 118),
    (1.0, 119),
    (1.75, 119),
    (3.5, 120),
    (448.0, 127),
    (480.0, 128),
    (FLT_MAX, 247),
    (math.inf, 254),
]
E8M0_E5M2 = [(1.0, 112), (57344.0, 127)]


@pytest.mark.parametrize(
    "value, largest, exponent",
    [(v, 448.0, e) for v, e in E8M0_E4M3] + [(v, 57344.0, e) for v, e in E8M0_E5M2],
)
def test_e8m0(value: float, largest: float, exponent: int) -> None:
    scale, scale_inv = ScaleRule("e8m0").scales(torch.tensor([value]), largest)
    assert scale_inv.item() == 2.0 ** (exponent - 127)
    assert scale.item() == 2.0 ** (127 - exponent)


def test_e8m0_by_exact_arithmetic() -> None:
    """Over random amaxes: the smallest power of two not below amax · fp32(1/448)."""
    bits = np.random.default_rng(0).integers(0, 0x7F800000, 20_000, dtype=np.int32)
    amaxes = bits.view(np.float32)
    product = amaxes * (np.float32(1) / np.float32(448))
    mantissa, exponent = np.frexp(product.astype(np.float64))
    up = np.where(mantissa == 0.5, exponent - 1, exponent).astype(np.float64)
    expected = np.where(product == 0, -127.0, np.clip(up, -127, 127))
    _, scale_inv = ScaleRule("e8m0").scales(torch.from_numpy(amaxes), 448.0)
    np.testing.assert_array_equal(np.log2(scale_inv.double().numpy()), expected)


@pytest.mark.parametrize("kind", ["fp32", "power_of_two", "e8m0"])
def test_a_margin_leaves_room(kind: str) -> None:
    for margin in (0, 3):
        scale, _ = ScaleRule(kind, margin).scales(torch.tensor([0.5, 3.0, 1e-20]), 448.0)
        top = scale * torch.tensor([0.5, 3.0, 1e-20])
        assert (top <= 448.001 * 2.0**-margin).all() and (top > 223 * 2.0**-margin).all()


# --- delayed scaling's history -----------------------------------------------------------------


def state(length: int, compute: str = "max") -> DelayedState:
    recipe = DelayedScaling(ALL_E4M3, history_length=length, amax_compute=compute)
    return DelayedState({"layer": recipe}, torch.device("cpu"))


def feed(delayed: DelayedState, amaxes: list[float]) -> list[float]:
    """The amax that each update used, read back from the scale of row 0."""
    used = []
    for value in amaxes:
        delayed.stage(0, torch.tensor(value))
        delayed.roll()
        used.append(448.0 / delayed.scale[0].item())
    return used


def test_history_of_four() -> None:
    assert feed(state(4), [2, 8, 4, 1, 0, 16, 1]) == [2, 8, 8, 8, 8, 16, 16]


def test_zero_neither_rolls_nor_rescales() -> None:
    assert feed(state(4), [8, 0, 0, 0, 0, 1]) == [8, 8, 8, 8, 8, 8]


def test_an_entry_leaves_after_its_last_use() -> None:
    assert feed(state(3), [8, 1, 1, 1, 1]) == [8, 8, 8, 1, 1]


def test_inf_freezes_the_scale_until_it_leaves() -> None:
    delayed = state(3)
    assert feed(delayed, [4, math.inf, 2, 2, 2]) == [4, 4, 4, 4, 2]


def test_most_recent() -> None:
    assert feed(state(4, "most_recent"), [2, 8, 4, 1]) == [2, 8, 4, 1]


def test_micro_batches_count_by_their_maximum_and_a_skipped_step_by_nothing() -> None:
    delayed = state(4)
    for value in (2.0, 8.0, 4.0):
        delayed.stage(1, torch.tensor(value))
    delayed.roll()
    assert delayed.scale.tolist() == [1.0, 56.0, 1.0]
    delayed.stage(1, torch.tensor(100.0))
    delayed.discard()
    delayed.roll()
    assert delayed.scale.tolist() == [1.0, 56.0, 1.0]
