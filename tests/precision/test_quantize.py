"""The CPU kernels against the plain torch forms and the eight-bit cast, bit for bit."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fp8train.precision import quantize
from fp8train.precision.backends import cpu_kernels
from fp8train.precision.formats import E4M3, E5M2, Format, cast
from fp8train.precision.scaling import scale_from_amax
from fp8train.precision.tensor import QuantizedTensor

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
BLOCKS = [(1, 128), (128, 1), (128, 128)]
values = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.inf, math.nan, 1e-40, 3e38])
matrices = hnp.arrays(
    np.float32, st.tuples(*[st.integers(1, 150)] * 2), elements=values, fill=values
)


def plain(function, *args, **kwargs) -> QuantizedTensor:
    """The result without the compiled kernels."""
    with mock.patch.object(cpu_kernels, "library", return_value=None):
        return function(*args, **kwargs)


def bits(x: Tensor) -> Tensor:
    """Bit patterns, all NaNs alike."""
    x = torch.where(x.isnan(), torch.nan, x.float())
    return x.view(torch.int32)


def same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert torch.equal(bits(a.payload), bits(b.payload))
    assert torch.equal(bits(a.scale_inv), bits(b.scale_inv))


def test_kernels_are_built() -> None:
    assert cpu_kernels.library() is not None, "this machine has a compiler: the kernels must build"


def test_without_a_compiler_plain_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert cpu_kernels.library.__wrapped__() is None


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=25)
@given(x=matrices, scale=st.sampled_from([1.0, 0.37, 448.0, 2.0**-100, 3e38]))
def test_per_tensor(fmt: Format, dtype: torch.dtype, x: np.ndarray, scale: float) -> None:
    tensor, factor = torch.from_numpy(x).to(dtype), torch.tensor(scale)
    for payload in (torch.float32, torch.bfloat16):
        ours = quantize.quantize_tensor(tensor, factor, fmt, payload)
        same(ours, plain(quantize.quantize_tensor, tensor, factor, fmt, payload))
        reference = cast(tensor.float() * factor, fmt).to(payload)
        assert torch.equal(bits(ours.payload), bits(reference))
    with mock.patch.object(cpu_kernels, "library", return_value=None):
        expected = quantize.tensor_amax(tensor)
    assert torch.equal(quantize.tensor_amax(tensor), expected)


@FORMATS
@pytest.mark.parametrize("block", BLOCKS)
@settings(deadline=None, max_examples=25)
@given(x=matrices, power_of_two=st.booleans(), margin=st.sampled_from([0, 32, -6]))
def test_blocks(
    fmt: Format, block: tuple[int, int], x: np.ndarray, power_of_two: bool, margin: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.from_numpy(x).to(dtype)
        options = {"margin": margin, "power_of_two": power_of_two}
        for dequantize in (False, True) if power_of_two else (False,):
            for payload in (torch.float32, torch.bfloat16):
                args = (tensor, fmt, block, payload)
                ours = quantize.quantize_blocks(*args, **options, dequantize=dequantize)
                same(ours, plain(quantize.quantize_blocks, *args, **options, dequantize=dequantize))


@FORMATS
def test_blocks_by_hand(fmt: Format) -> None:
    """A loop over blocks with the eight-bit cast: slow, plain, and sharing no code."""
    x = torch.randn(200, 300) * torch.logspace(-6, 6, 300)
    for rows, columns in BLOCKS:
        ours = quantize.quantize_blocks(x, fmt, (rows, columns), torch.float32)
        for i in range(0, 200, rows):
            for j in range(0, 300, columns):
                tile = x[i : i + rows, j : j + columns]
                scale = scale_from_amax(tile.abs().max(), fmt.max, power_of_two=True)
                expected = cast(tile * scale, fmt).float()
                assert torch.equal(ours.payload[i : i + rows, j : j + columns], expected)
                assert ours.scale_inv[i // rows, j // columns] == 1 / scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantized_payload_is_exact(dtype: torch.dtype) -> None:
    x = torch.randn(256, 256).bfloat16()
    for block in BLOCKS:
        payload = quantize.quantize_blocks(x, E4M3, block, dtype)
        values = quantize.quantize_blocks(x, E4M3, block, dtype, dequantize=True)
        assert torch.equal(payload.dequantize(), values.payload.float())


@pytest.mark.parametrize("shape", [(0, 128), (4, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    x = torch.empty(shape)
    for block in BLOCKS:
        args = (x, E4M3, block, torch.float32)
        same(quantize.quantize_blocks(*args), plain(quantize.quantize_blocks, *args))


def test_tensors_without_memory_of_their_own_are_left_to_torch() -> None:
    class Wrapped(torch.Tensor):
        pass

    assert cpu_kernels.usable(torch.ones(3))
    assert cpu_kernels.usable(torch.nn.Parameter(torch.ones(3)))
    assert not cpu_kernels.usable(torch.ones(3).as_subclass(Wrapped))
    assert not cpu_kernels.usable(torch.ones(4, 4)[:, :2])


def test_non_contiguous_tensors() -> None:
    x = torch.randn(130, 70).bfloat16()
    for view in (x.t(), x[::2], x[:, 3:]):
        for block in BLOCKS:
            same(
                quantize.quantize_blocks(view, E4M3, block, torch.float32),
                quantize.quantize_blocks(view.contiguous(), E4M3, block, torch.float32),
            )


def snr(x: Tensor, quantized: Tensor) -> float:
    return 10 * math.log10(float(x.square().sum() / (x - quantized).square().sum()))


@pytest.mark.parametrize(
    "name, per_tensor, vector, square",  # dB for E4M3 and E5M2, FP32 scales
    [
        ("gaussian", (31.5, 25.6), (31.8, 25.8), (31.6, 25.6)),
        ("student", (31.6, 25.6), (33.1, 27.1), (31.8, 25.8)),
        ("channels", (31.5, 25.6), (42.0, 36.0), (31.8, 25.6)),
        ("rows", (31.6, 25.6), (31.8, 25.8), (31.6, 25.6)),
    ],
)
def test_signal_to_noise(name: str, per_tensor, vector, square) -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 4096)
    if name == "student":
        x = torch.distributions.StudentT(3.0).sample((1024, 4096))
    if name == "channels":
        x[:, ::1024] *= 100
    if name == "rows":
        x *= 2.0 ** -(torch.arange(1024) % 21)[:, None]
    for index, fmt in enumerate((E4M3, E5M2)):
        scale = scale_from_amax(x.abs().max(), fmt.max)
        got = quantize.quantize_tensor(x, scale, fmt, torch.float32).dequantize()
        assert snr(x, got) == pytest.approx(per_tensor[index], abs=0.3)
        if name == "rows" and fmt is E4M3:
            assert (got == 0).float().mean().item() == pytest.approx(0.225, abs=0.005)
        for block, expected in (((1, 128), vector), ((128, 128), square)):
            for power_of_two, target in ((False, expected[index]), (True, (31.5, 25.5)[index])):
                got = quantize.quantize_blocks(
                    x, fmt, block, torch.float32, power_of_two=power_of_two
                ).dequantize()
                assert snr(x, got) == pytest.approx(target, abs=0.3), (block, power_of_two)
