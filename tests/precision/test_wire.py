"""Gradient messages: sizes, errors and what happens to NaN and Inf."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8train.precision.formats import E5M2, cast
from fp8train.precision.wire import CODECS


def roundtrip(name: str, x: torch.Tensor) -> torch.Tensor:
    codec = CODECS[name]
    return torch.stack([codec.decode(message, x.shape[1]) for message in codec.encode(x)])


@given(st.integers(1, 3), st.integers(1, 400), st.integers(-120, 120))
def test_any_size_and_magnitude(rows: int, size: int, exponent: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(rows, size) * 2.0**exponent
    assert torch.equal(roundtrip("fp32", x), x)
    assert torch.equal(roundtrip("bf16", x), x.bfloat16().float())
    got = roundtrip("e5m2", x)
    assert got.shape == x.shape
    assert ((got - x).double().norm() / x.double().norm()).item() < 0.13


def test_message_bytes() -> None:
    x = torch.randn(4, 1000)
    assert CODECS["e5m2"].encode(x).shape == (4, 1024 + 8)
    assert CODECS["bf16"].encode(x).shape == (4, 2000)
    assert CODECS["fp16"].encode(x).shape == (4, 2000)
    assert CODECS["fp32"].encode(x).shape == (4, 4000)


def test_e5m2_by_hand() -> None:
    x = torch.randn(1, 256) * torch.tensor([1e-6] * 128 + [1e4] * 128)
    got = roundtrip("e5m2", x)[0]
    for block in (slice(0, 128), slice(128, 256)):
        values = x[0, block]
        scale = 2.0 ** math.floor(math.log2(57344.0 / values.abs().max().item()))
        assert torch.equal(got[block], cast(values * scale, E5M2).float() / scale)


def test_relative_error_of_gaussian_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2**20)
    error = ((roundtrip("e5m2", x) - x).norm() / x.norm()).item()
    assert error == pytest.approx(0.053, abs=0.002)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_arrives_as_nan(bad: float) -> None:
    x = torch.ones(1, 300)
    x[0, 130] = bad
    got = roundtrip("e5m2", x)[0]
    assert got[128:256].isnan().all()
    assert torch.equal(got[:128], x[0, :128]) and torch.equal(got[256:], x[0, 256:])


def test_fp16_never_clips() -> None:
    x = torch.tensor([[65504.0, 65519.0, 65520.0, -1e9, 2.0**-24, 2.0**-26, math.nan]])
    got = roundtrip("fp16", x)[0]
    assert got[:6].tolist() == [65504.0, 65504.0, math.inf, -math.inf, 2.0**-24, 0.0]
    assert got[6].isnan()
    x = torch.randn(3, 77)
    assert torch.equal(roundtrip("fp16", x), x.half().float())


def test_zeros_stay_zeros() -> None:
    assert torch.equal(roundtrip("e5m2", torch.zeros(2, 200)), torch.zeros(2, 200))
