"""Gradient messages: sizes, errors and what happens to NaN and Inf."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8train.precision.formats import E5M2, cast
from fp8train.precision.kernels import wire_kernels
from fp8train.precision.quantize import Draw
from fp8train.precision.wire import FORMATS, EightBit, codec

SCALINGS = ("block", "tensor", "none")


def roundtrip(name: str, x: torch.Tensor, scaling: str = "block") -> torch.Tensor:
    wire = codec(name, scaling)
    return torch.stack([wire.decode(message, x.shape[1]) for message in wire.encode(x)])


def eight_bit(name: str, scaling: str) -> EightBit:
    wire = codec(name, scaling)
    assert isinstance(wire, EightBit)
    return wire


def bits(seed: int, rows: int, size: int) -> torch.Tensor:
    """FP32 of every kind: bit patterns for the most part, NaN, Inf and subnormal ones among them,
    and rows of moderate ones, which have no NaN in every block."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31, (rows, size), generator=generator)
    x = patterns.to(torch.int32).view(torch.float32)
    scale = 2.0 ** torch.randint(-140, 120, (rows, 1), generator=generator)
    moderate = torch.randn(rows, size, generator=generator) * scale
    moderate[:, ::7] = 0
    return torch.where(torch.arange(rows)[:, None] % 3 == 0, x, moderate)


@given(
    st.sampled_from(list(FORMATS)),
    st.sampled_from(SCALINGS),
    st.integers(1, 4),
    st.integers(1, 2500),
    st.integers(0, 2**20),
    st.booleans(),
)
def test_the_kernels_have_the_bits_of_the_torch_form(
    name: str, scaling: str, rows: int, size: int, seed: int, drawn: bool
) -> None:
    assert wire_kernels.usable(torch.ones(1))
    wire, x = eight_bit(name, scaling), bits(seed, rows, size)
    draw = Draw(seed, 2**40 + seed, row_offset=3) if drawn else None
    messages = wire.encode(x, draw)
    assert torch.equal(messages, wire.encode_plainly(x, draw))
    assert messages.shape == (rows, wire.width(size))
    for message in messages:
        values = wire.decode_plainly(message, size)
        assert torch.equal(
            wire.decode(message, size).view(torch.int32)[values.isfinite()],
            values.view(torch.int32)[values.isfinite()],
        )
        total = torch.linspace(-1, 1, size)
        expected = total + values
        wire.add(total, message[None])
        torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)


@given(st.sampled_from(SCALINGS), st.integers(0, 2**20))
def test_not_finite_is_seen_and_nothing_else_is(scaling: str, seed: int) -> None:
    x = bits(seed, 3, 1000)
    x[x.isfinite()] = x[x.isfinite()].clamp(-(2.0**127), 2.0**127)  # above, rounding may overflow
    got = roundtrip("e5m2", x, scaling)
    assert (got.isfinite() <= x.isfinite()).all()
    clean = x.isfinite()
    if scaling == "tensor":
        clean = clean.all(dim=1, keepdim=True).expand_as(x)
    if scaling == "block":
        ends = torch.nn.functional.pad(clean, (0, 24), value=True).view(3, 8, 128)
        clean = ends.all(dim=2).repeat_interleave(128, dim=1)[:, :1000]
    assert torch.equal(got.isfinite(), clean)


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_is_right_on_average(name: str) -> None:
    torch.manual_seed(0)
    x, wire = torch.randn(1, 4096), eight_bit(name, "block")
    count = 400
    mean = torch.zeros(4096)
    for tick in range(count):
        wire.add(mean, wire.encode(x, Draw(7, tick)))
    once = wire.decode(wire.encode(x, Draw(7, 0))[0], 4096) - x[0]
    nearest = wire.decode(wire.encode(x)[0], 4096) - x[0]
    error = (mean / count - x[0]).norm()
    assert error < 1.2 * once.norm() / count**0.5 < nearest.norm() / 8


def test_saturated_and_flushed() -> None:
    plain = eight_bit("e5m2", "none")
    x = torch.tensor([[1e9, -57344.0, 1e-9, 0.0, 1.0, -(2.0**-17)]])
    messages = plain.encode(x)
    assert plain.saturated(messages, x) == 1  # -57344 is what it was
    assert plain.flushed(messages, x) == 2
    assert plain.decode(messages[0], 6).tolist() == [57344.0, -57344.0, 0.0, 0.0, 1.0, -0.0]


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
    widths = {"e5m2": 1000 + 8, "e4m3": 1000 + 8, "bf16": 2000, "fp16": 2000, "fp32": 4000}
    for name, width in widths.items():
        assert codec(name).encode(x).shape == (4, width)
        assert codec(name).width(1000) == width
    assert codec("e5m2", "tensor").encode(x).shape == (4, 1001)
    assert codec("e5m2", "none").encode(x).shape == (4, 1000)


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
