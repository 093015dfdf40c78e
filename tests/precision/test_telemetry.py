"""Telemetry's numbers against their definitions in FP64, on tensors with awkward values too."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

from fp8train.config import PrecisionConfig
from fp8train.precision import telemetry
from fp8train.precision.convert import convert
from fp8train.precision.formats import E4M3, E5M2
from fp8train.precision.nvfp4 import quantize_nvfp4
from fp8train.precision.quantize import Payload, apply_scales, quantize
from fp8train.precision.quantizers import Operand
from fp8train.precision.recipes import ROLES
from fp8train.precision.scaling import ScaleRule, Scales
from fp8train.precision.telemetry import (
    STATISTICS,
    Scratch,
    Statistics,
    Telemetry,
    measure,
    statistics,
    total,
)
from fp8train.precision.tensor import COLUMN, ROW, TENSOR, Granularity, QuantizedTensor

CPU = torch.device("cpu")
BF16 = Payload(torch.bfloat16)
GRANULARITIES = [TENSOR, ROW, COLUMN, Granularity(1, 128), Granularity(128, 128)]


def stats(x: Tensor, operand: Operand) -> Statistics:
    return statistics(total(measure(x, operand, Scratch())))


def at_scale(x: Tensor, scale: float) -> QuantizedTensor:
    s = torch.full((1, 1), scale)
    return apply_scales(x, Scales(s, s.reciprocal()), E4M3, TENSOR, BF16)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fold", ["never", "exact"])
@pytest.mark.parametrize("rows", [300, 1])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_numbers_are_those_of_fp64(
    granularity: Granularity,
    fold: str,
    rows: int,
    in_pieces: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if in_pieces:
        monkeypatch.setattr(telemetry, "PIECE", 1)
    torch.manual_seed(0)
    # Tiny, so that squares leave FP32's range, with heavy tails, a mean, and values that flush.
    x = ((torch.randn(rows, 200) ** 3 + 0.5) * 1e-21).bfloat16()
    rule = ScaleRule("power_of_two", margin=-3)  # 8 times too large a scale
    q = quantize(x, E4M3, granularity, rule, Payload(torch.bfloat16, fold))  # type: ignore[arg-type]
    found = stats(x, q)
    exact, after = x.double(), q.dequantize(torch.float32).double()
    limit = E4M3.max * q.expanded_scale_inv().double().expand(x.shape)
    deviation = exact - exact.mean()
    assert found["amax"] == pytest.approx(exact.abs().max().item(), rel=1e-5)
    scale = (-q.scale_inv.double().log2()).mean().exp2().item()
    assert found["scale"] == pytest.approx(scale, rel=0.2 if in_pieces else 1e-5)
    saturated = (exact.abs() > limit).double().mean().item()
    assert found["saturated"] == pytest.approx(saturated, rel=1e-5)
    assert found["saturated"] and found["saturated"] > 0
    flushed = ((exact != 0) & (after == 0)).sum() / (exact != 0).sum()
    assert found["flushed"] == pytest.approx(flushed.item(), rel=1e-5)
    noise = ((exact - after) ** 2).sum()
    assert found["snr_db"] == pytest.approx(10 * math.log10((exact**2).sum() / noise), abs=1e-3)
    kurtosis = (deviation**4).mean() / (deviation**2).mean() ** 2
    assert found["kurtosis"] == pytest.approx(kurtosis.item(), rel=1e-4)


def test_known_shares() -> None:
    x = torch.tensor([[448.0, 464.0, 449.0, -1000.0, 2.0**-10, 2.0**-9, 0.0, 1.0]])
    found = stats(x, at_scale(x, 1.0))
    assert found["scale"] == 1 and found["amax"] == 1000
    assert found["saturated"] == 3 / 8  # 448 is the format's largest value
    assert found["flushed"] == pytest.approx(1 / 7, rel=1e-5)  # 2^-10; a 0 is not flushed


def test_an_amax_at_the_top_is_not_saturated() -> None:
    torch.manual_seed(0)
    for _ in range(200):  # FP32's rounding brings about every fourth one above the format's max
        x = torch.randn(4, 16)
        for fmt in (E4M3, E5M2):
            assert stats(x, quantize(x, fmt, TENSOR, ScaleRule(), BF16))["saturated"] == 0


def test_kurtosis_of_a_gaussian_far_from_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 512) + 100
    assert stats(x, x)["kurtosis"] == pytest.approx(3, abs=0.05)


def test_what_is_not_defined_is_none() -> None:
    nothing = dict.fromkeys(STATISTICS)
    zeros, one = torch.zeros(4, 16), torch.tensor([[1.0, 0.0]])
    assert stats(zeros, at_scale(zeros, 2.0)) == nothing | {
        "amax": 0.0,
        "scale": 2.0,
        "saturated": 0.0,
    }
    assert stats(torch.empty(0, 16), at_scale(torch.empty(0, 16), 2.0)) == nothing
    assert stats(one, at_scale(one, 2.0))["snr_db"] is None  # no noise
    assert stats(zeros + 3, zeros + 3) == nothing | {"amax": 3.0}  # high precision, no variance
    broken = torch.tensor([[math.nan, 1.0, 0.3, 500.0]])
    found = stats(broken, at_scale(broken, 1.0))
    assert (found["snr_db"], found["kurtosis"], found["saturated"]) == (None, None, 0.25)
    broken[0, 0] = math.inf
    found = stats(broken, at_scale(broken, 1.0))
    assert (found["amax"], found["snr_db"], found["saturated"]) == (None, None, 0.5)
    json.dumps(found, allow_nan=False)


def test_the_two_levels_of_nvfp4() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    x[0] *= 1e-7  # blocks whose scale is 0 in E4M3: all of it is flushed
    for payload in (BF16, Payload(torch.bfloat16, "always")):
        q = quantize_nvfp4(x, Granularity(1, 16), payload)
        found = stats(x, q)
        assert q.tensor_scale_inv is not None
        scale = -(q.scale_inv[1:].double() * q.tensor_scale_inv.double()).log2()
        assert found["scale"] == pytest.approx(scale.mean().exp2().item(), rel=1e-5)
        limit = 6 * q.expanded_scale_inv() * q.tensor_scale_inv * (1 + 2.0**-20)
        saturated = (x[1:].abs() > limit[1:]).sum().item() / x.numel()  # the first row is not
        assert found["saturated"] == pytest.approx(saturated, rel=1e-5)
        after = q.dequantize()
        assert found["flushed"] == pytest.approx((after == 0).double().mean().item(), rel=1e-5)
        snr = 10 * math.log10(x.square().sum() / (x - after).square().sum())
        assert found["snr_db"] == pytest.approx(snr, abs=1e-3)


def observed(precision: PrecisionConfig) -> tuple[nn.Sequential, Telemetry]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)).bfloat16()
    precision.include = ["*"]
    conversion = convert(model, precision, CPU)
    return model, Telemetry(conversion.numerics, 10, CPU)


def test_steps_that_are_sampled() -> None:
    _, watch = observed(PrecisionConfig(recipe="fp8_current"))
    assert [step for step in range(1, 31) if watch.due(step)] == [1, 10, 20, 30]
    watch.every = 0
    assert not watch.on and not watch.due(1) and watch.end_step() is None
    assert not Telemetry({}, 10, CPU).due(1)


def test_the_first_micro_batch_is_what_is_seen() -> None:
    model, watch = observed(PrecisionConfig(recipe="fp8_current"))
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    grad = torch.randn(16, 32).bfloat16()
    watch.begin_step(1)
    model(x).backward(grad)
    model(100 * x).backward(100 * grad)
    found = watch.end_step()
    assert found is not None
    assert list(found) == [f"{layer}.{role}" for layer in "01" for role in ROLES]
    assert found["0.input"]["amax"] == pytest.approx(x.abs().max().item(), rel=1e-5)
    assert found["1.grad_output"]["amax"] == pytest.approx(grad.abs().max().item(), rel=1e-5)
    assert all(value is not None for each in found.values() for value in each.values())
    assert all(numerics.observer is None for numerics in watch.numerics.values())
    watch.begin_step(2)
    model(x).backward(grad)
    assert watch.end_step() is None and not watch.seen


def test_a_role_in_high_precision() -> None:
    precision = PrecisionConfig(recipe="fp8_current", bf16_inputs=["1"])
    model, watch = observed(precision)
    watch.begin_step(1)
    model.eval()
    model(torch.randn(16, 32).bfloat16())
    assert not watch.seen  # an evaluation is not training
    model.train()
    model(torch.randn(16, 32).bfloat16())
    found = watch.end_step()
    assert found is not None
    known = {name for name, value in found["1.input"].items() if value is not None}
    assert known == {"amax", "kurtosis"}
    assert "1.grad_output" not in found  # there was no backward
