"""NVFP4 against a loop over blocks with ml_dtypes' casts, bit for bit, and the Hadamard transform
against a matrix product in FP64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fp8train.precision.kernels import cpu_kernels
from fp8train.precision.nvfp4 import SIGNS, hadamard, quantize_nvfp4
from fp8train.precision.quantize import Payload
from fp8train.precision.tensor import Granularity

FLT_MAX = np.finfo(np.float32).max
ONE, SIXTH, MOST = (np.float32(value) for value in (1, 1 / 6, 448 * 6))


@pytest.fixture(params=["kernels", "plain torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the same arithmetic."""
    if request.param == "plain torch":
        monkeypatch.setattr(cpu_kernels, "library", lambda: None)


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def reference(x: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """q, d and 1/S of FP32 x: one block after the other, every operation in FP32."""
    amax = np.nanmax(np.abs(x))
    usable = amax > 0 and np.isfinite(amax)
    encode = min(MOST / amax, FLT_MAX) if usable else ONE
    decode = ONE / encode
    q = np.empty_like(x)
    d = np.empty((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    for i in range(d.shape[0]):
        for j in range(d.shape[1]):
            block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            wanted = np.nanmax(np.abs(x[block])) * (encode * SIXTH)
            d[i, j] = np.minimum(wanted, 448).astype(ml_dtypes.float8_e4m3fn)
            scale = min(ONE / (d[i, j] * decode), FLT_MAX)
            scaled = np.clip(x[block] * scale, -6, 6)
            rounded = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
            q[block] = np.where(np.isnan(scaled), np.nan, rounded)
    return q, d, decode


def matrices() -> dict[str, Tensor]:
    torch.manual_seed(11)
    wide = torch.randn(48, 64) * 2.0 ** torch.randint(-30, 30, (48, 64))
    special = torch.randn(32, 48) * 1e-3
    special[0, 3], special[17, 20], special[20:24, :16], special[9, 40] = 5.0, -0.0, 0.0, torch.nan
    infinite = torch.randn(16, 32)
    infinite[2, 20] = -torch.inf
    return {
        "gaussian": torch.randn(64, 96),
        "bfloat16": torch.randn(64, 96).bfloat16() * 37,
        "not a multiple of 16": torch.randn(21, 35),
        "wide": wide,
        "special": special,
        "infinite": infinite,
        "zeros": torch.zeros(16, 32),
        "subnormal": torch.randn(16, 32) * 1e-39,
        "S overflows": torch.randn(16, 32) * 1e-36,
        "large": torch.randn(16, 32) * 5e37,
    }


def bits(x: Tensor) -> Tensor:
    """Bit patterns, all NaNs alike."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


@pytest.mark.parametrize("name", matrices())
@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
def test_against_a_loop(name: str, block: tuple[int, int]) -> None:
    x = matrices()[name]
    ours = quantize_nvfp4(x, Granularity(*block), Payload(torch.float32))
    q, d, decode = reference(x.float().numpy(), *block)
    assert ours.tensor_scale_inv is not None
    assert ours.tensor_scale_inv.item() == decode
    assert torch.equal(ours.scale_inv, torch.from_numpy(d))
    assert torch.equal(bits(ours.payload), bits(torch.from_numpy(q)))


def test_values_times_block_scales_are_exact_in_bf16() -> None:
    """What the emulated GEMM is handed."""
    x = matrices()["gaussian"]
    apart = quantize_nvfp4(x, Granularity(1, 16), Payload(torch.float32))
    folded = quantize_nvfp4(x, Granularity(1, 16), Payload(torch.bfloat16, "always"))
    assert folded.folded
    assert torch.equal(folded.payload.float(), apart.payload * apart.expanded_scale_inv())


def matrix() -> Tensor:
    """The transform as a 16×16 matrix in FP64: Sylvester's, with signs in front."""
    h = np.ones((1, 1))
    for _ in range(4):
        h = np.kron([[1, 1], [1, -1]], h)
    return torch.from_numpy(h / 4 * np.array(SIGNS))


def test_the_hadamard_matrix() -> None:
    h = matrix()
    assert torch.equal(hadamard(torch.eye(16)).double(), h)
    assert torch.equal(h @ h.t(), torch.eye(16).double())
    assert sum(SIGNS) != 16


@pytest.mark.parametrize("rows", [16, 80, 37])
def test_the_hadamard_transform(rows: int) -> None:
    """Within 15 roundings of FP32 sums of 16, none where rows are padded with zeros."""
    x = torch.randn(rows, 24)
    padded = torch.zeros(-(-rows // 16), 16, 24, dtype=torch.float64)
    padded.view(-1, 24)[:rows] = x
    expected = (matrix() @ padded).view(-1, 24)
    bound = 4 * 2.0**-24 * (matrix().abs() @ padded.abs()).view(-1, 24)
    assert ((hadamard(x).double() - expected).abs() <= bound).all()


def test_the_hadamard_transform_keeps_the_product() -> None:
    a, b = torch.randn(69, 16), torch.randn(69, 24)
    product = hadamard(a).double().t() @ hadamard(b).double()
    torch.testing.assert_close(product, a.double().t() @ b.double(), rtol=0, atol=1e-5)


def test_the_hadamard_transform_spreads_an_outlier() -> None:
    x = torch.zeros(16, 1)
    x[5] = 100.0
    assert torch.equal(hadamard(x).abs(), torch.full((16, 1), 25.0))
