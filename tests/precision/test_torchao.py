"""torchao's emulation as an oracle: payload bytes and scales exactly, GEMMs within BF16's ulps.

torchao implements per-tensor, row-wise, MX and NVFP4 scaling independently. Where it is no oracle:

- An amax below 1e-12: torchao clamps it, Transformer Engine and we do not.
- NaN: it enters torchao's amax and spoils the block; in ours it stays one NaN.
- FP32 values whose amax is within a few 2^-24 of the format's maximum times a power of two: torchao
  finds powers of two by log2 in FP32, which rounds such a ratio to the power. BF16 values are never
  so close, so operands are BF16 here, and two tests show the difference.
- MX modes other than RCEIL, which alone divides by the format's maximum as the hardware does; one
  test shows how CEIL and FLOOR differ. MX scales of 2^-127: torchao leaves the values unscaled.
- NVFP4 block scales below 2^-6, where torchao stops, and tensor scales that are no power of two,
  where it divides and multiplies in another order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import CastConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.moe_training.nvfp4_training.hadamard_utils import get_rht_matrix
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from fp8train.config import PrecisionConfig
from fp8train.precision.convert import convert
from fp8train.precision.formats import E2M1, E4M3, E5M2, Format, cast, e8m0_encode
from fp8train.precision.kernels import cpu_kernels
from fp8train.precision.nvfp4 import SIGNS, hadamard, quantize_nvfp4
from fp8train.precision.quantize import Payload, quantize
from fp8train.precision.quantizers import Position, Scaled
from fp8train.precision.recipes import OPERANDS, recipe_of
from fp8train.precision.scaling import ScaleRule
from fp8train.precision.tensor import ROW, Granularity, QuantizedTensor

ROWS, K, N = 64, 96, 160
PAYLOAD = Payload(torch.float32)
MX_DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E2M1: torch.float4_e2m1fn_x2}

dynamic = pytest.mark.parametrize(
    ("recipe", "power_of_two", "peer"),
    [
        ("fp8_current", False, "tensorwise"),
        ("fp8_current", True, "tensorwise"),
        ("fp8_rowwise", True, "rowwise"),
        ("fp8_rowwise_bf16_wgrad", True, "rowwise_with_gw_hp"),
    ],
)


@pytest.fixture(params=["kernels", "plain torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the same arithmetic."""
    if request.param == "plain torch":
        monkeypatch.setattr(cpu_kernels, "library", lambda: None)


def peer_config(peer: str, power_of_two: bool) -> Float8LinearConfig:
    recipe = Float8LinearConfig.from_recipe_name(peer)
    return replace(recipe, emulate=True, round_scales_to_power_of_2=power_of_two)


def precision_of(recipe: str, power_of_two: bool, emulation: str = "fast") -> PrecisionConfig:
    return PrecisionConfig(
        recipe=recipe, power_of_two_scales=power_of_two, emulation=emulation, include=["*"]
    )


def tensors() -> dict[str, Tensor]:
    """BF16 input, weight and output gradient whose columns differ by seven orders of magnitude."""
    torch.manual_seed(7)
    shapes = {"input": (ROWS, K), "weight": (N, K), "grad_output": (ROWS, N)}
    made = {}
    for role, (rows, columns) in shapes.items():
        x = torch.randn(rows, columns) * torch.logspace(-4, 3, columns)[torch.randperm(columns)]
        x[3, 5] = 0.0
        made[role] = x.bfloat16()
    return made


def operands_of(precision: PrecisionConfig) -> dict[tuple[str, str], Tensor | QuantizedTensor]:
    """Ours, by role and copy."""
    recipe = recipe_of(precision)
    assert recipe is not None
    found: dict[tuple[str, str], Tensor | QuantizedTensor] = {}
    for role, x in tensors().items():
        quantizer = Scaled(recipe, role, PAYLOAD)
        both = quantizer(x, rowwise=True, columnwise=True, training=True, position=Position())
        for copy, operand in zip(("rowwise", "columnwise"), both, strict=True):
            assert operand is not None
            found[role, copy] = operand
    return found


def stored(quantized: QuantizedTensor) -> Tensor:
    """The payload's bytes."""
    return cast(quantized.grid_values(), quantized.fmt).view(torch.uint8)


def theirs(x: Tensor, config: CastConfig, axis: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """torchao's payload and scale of one operand."""
    by_axis = config.scaling_granularity is ScalingGranularity.AXISWISE
    quantized = hp_tensor_to_float8_dynamic(
        x,
        config.target_dtype,
        LinearMMConfig(),
        scaling_granularity=config.scaling_granularity,
        axiswise_dim=axis if by_axis else None,
        round_scales_to_power_of_2=power_of_two,
    )
    return quantized._data, quantized._scale


@dynamic
def test_operands(recipe: str, power_of_two: bool, peer: str) -> None:
    """Each role's copies for both of its GEMMs."""
    config = peer_config(peer, power_of_two)
    casts = {
        ("input", "rowwise"): config.cast_config_input,
        ("input", "columnwise"): config.cast_config_input_for_grad_weight,
        ("weight", "rowwise"): config.cast_config_weight,
        ("weight", "columnwise"): config.cast_config_weight_for_grad_input,
        ("grad_output", "rowwise"): config.cast_config_grad_output,
        ("grad_output", "columnwise"): config.cast_config_grad_output_for_grad_weight,
    }
    high_precision = 0
    for (role, copy), ours in operands_of(precision_of(recipe, power_of_two)).items():
        x, cast_config = tensors()[role], casts[role, copy]
        if cast_config.scaling_type is ScalingType.DISABLED:
            assert isinstance(ours, Tensor) and torch.equal(ours, x)
            high_precision += 1
            continue
        assert isinstance(ours, QuantizedTensor)
        data, scale = theirs(x, cast_config, {"rowwise": -1, "columnwise": 0}[copy], power_of_two)
        assert ours.fmt.dtype == data.dtype
        assert torch.equal(stored(ours), data.view(torch.uint8)), (role, copy)
        assert scale.numel() == ours.scale_inv.numel()
        assert torch.equal(ours.scale_inv, scale.reciprocal().view_as(ours.scale_inv)), (role, copy)
    assert high_precision == (2 if recipe == "fp8_rowwise_bf16_wgrad" else 0)


def test_a_scale_just_below_a_power_of_two_is_where_log2_fails() -> None:
    """448 / amax is 1024·(1 − 2^-24): rounded down it is 512; its log2 in FP32 is 10."""
    x = torch.full((1, 16), 0.4375 + 2.0**-25)
    ours = quantize(x, E4M3, ROW, ScaleRule("power_of_two"), PAYLOAD)
    rowwise = peer_config("rowwise", True).cast_config_input
    assert 1 / ours.scale_inv.item() == 512
    assert theirs(x, rowwise, -1, True)[1].item() == 1024


def run(layer: nn.Module, weight: Tensor) -> dict[str, Tensor]:
    """Output and gradients, by the GEMM they come from."""
    data = tensors()
    x = data["input"].requires_grad_()
    y = layer(x)
    y.backward(data["grad_output"])
    assert x.grad is not None and weight.grad is not None
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": weight.grad}


def linear() -> nn.Linear:
    layer = nn.Linear(K, N, bias=False).bfloat16()
    layer.weight.data.copy_(tensors()["weight"])
    return layer


def hold(precision: PrecisionConfig, expected: dict[str, Tensor]) -> None:
    """A converted layer's output and gradients against torchao's.

    Both add exact products in FP32 and round the sum to BF16 once, half an ulp each: one ulp
    between them, at most 2^-7 of the value. In FP32 the order of a sum of k products may move it by
    k·2^-24 of the sum of their magnitudes, on either side, and a scale that is no power of two by a
    few 2^-24 more: torchao divides the values by it, ours multiplies the sum. Where the CPU's GEMM
    gives BF16 (emulation=fast, in hardware), rounding before a scale costs one ulp more.
    """
    model = nn.Sequential(linear())
    convert(model, precision, torch.device("cpu"))
    ours = run(model, model.get_parameter("0.weight"))
    values = {
        key: (operand if isinstance(operand, Tensor) else operand.dequantize()).double().abs()
        for key, operand in operands_of(precision).items()
    }
    ulps = 1 if precision.emulation == "exact" else 2
    for gemm, operands in OPERANDS.items():
        a, b = (values[operand] for operand in operands)
        a, b = (a.t() if gemm == "wgrad" else a), (b.t() if gemm == "fprop" else b)
        mine, other = ours[gemm].double(), expected[gemm].double()
        bound = ulps * 2.0**-7 * torch.maximum(mine.abs(), other.abs())
        bound += 2 * (a.shape[1] + 8) * 2.0**-24 * (a @ b)
        assert ours[gemm].dtype == expected[gemm].dtype == torch.bfloat16
        assert ((mine - other).abs() <= bound).all(), gemm


@dynamic
@pytest.mark.parametrize("emulation", ["fast", "exact"])
def test_a_linear(recipe: str, power_of_two: bool, peer: str, emulation: str) -> None:
    layer = Float8Linear.from_float(linear(), peer_config(peer, power_of_two))
    hold(precision_of(recipe, power_of_two, emulation), run(layer, layer.weight))


@pytest.mark.parametrize("emulation", ["fast", "exact"])
def test_an_mxfp8_linear(emulation: str) -> None:
    class Peer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = mx_mm.apply(
                x,
                weight,
                *[torch.float8_e4m3fn] * 3,
                32,
                KernelPreference.EMULATED,
                MXFP8Dim0CastKernelChoice.TORCH,
                MXFP8Dim1CastKernelChoice.TORCH,
                ScaleCalculationMode.RCEIL,
                False,
            )
            return y

    weight = linear().weight
    hold(precision_of("mxfp8", True, emulation), run(Peer(), weight))


def blocks(dtype: torch.dtype) -> Tensor:
    """[64, 256] of all magnitudes that MX scales reach, with zeros, Inf and the largest values."""
    torch.manual_seed(3)
    x = torch.randn(64, 256) * 2.0 ** torch.randint(-100, 120, (64, 8)).repeat_interleave(32, 1)
    x[0, :32] = 0.0
    x[1, 40] = torch.inf
    x[2, 64:96] = -torch.finfo(torch.bfloat16).max
    x[3, :32] *= torch.rand(32) < 0.5  # zeros of both signs
    return x.to(dtype)


@pytest.mark.parametrize("fmt", MX_DTYPES, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("columnwise", [False, True])
def test_mx_operands(fmt: Format, columnwise: bool) -> None:
    x = blocks(torch.bfloat16)
    granularity = Granularity(32, 1) if columnwise else Granularity(1, 32)
    ours = quantize(x, fmt, granularity, ScaleRule("e8m0"), PAYLOAD)
    values, scale_inv = ours.grid_values(), ours.scale_inv
    if columnwise:
        x, values, scale_inv = x.t().contiguous(), values.t(), scale_inv.t()
    scale, data = to_mx(x, MX_DTYPES[fmt], 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(e8m0_encode(scale_inv), scale.view(torch.uint8))
    assert torch.equal(cast(values, fmt).view(torch.uint8), data.view(torch.uint8))


def test_which_mx_mode_is_ours() -> None:
    """Blocks whose amax is 1 + i/128 times 2^10, for each i."""
    mantissa = 1 + torch.arange(128) / 128
    x = (mantissa * 2.0**10)[:, None].expand(128, 32).contiguous()
    ours = quantize(x, E4M3, Granularity(1, 32), ScaleRule("e8m0"), PAYLOAD)
    exponent = e8m0_encode(ours.scale_inv)[:, 0].int()

    def peer(mode: ScaleCalculationMode) -> Tensor:
        return to_mx(x, torch.float8_e4m3fn, 32, mode)[0].view(torch.uint8)[:, 0].int()

    assert torch.equal(peer(ScaleCalculationMode.RCEIL), exponent)
    coarser = (mantissa > 1) & (mantissa <= 1.75)
    assert torch.equal(peer(ScaleCalculationMode.CEIL), exponent + coarser.int())
    saturates = mantissa > 1.75  # 1.75 · 2^8 is E4M3's largest value
    assert torch.equal(peer(ScaleCalculationMode.FLOOR), exponent - saturates.int())


def test_an_amax_just_above_a_power_of_two_is_where_log2_fails() -> None:
    """amax / 448 is 1024·(1 + 2^-22): rounded up it is 2048; its log2 in FP32 is 10."""
    x = torch.full((1, 32), 448 * 1024 * (1 + 2.0**-22))
    ours = quantize(x, E4M3, Granularity(1, 32), ScaleRule("e8m0"), PAYLOAD)
    scale, _ = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert e8m0_encode(ours.scale_inv).item() == 127 + 11
    assert scale.view(torch.uint8).item() == 127 + 10


def test_nvfp4_operands() -> None:
    """The tensor's amax is 448·6·2^k, so that its scale is a power of two."""
    torch.manual_seed(5)
    for k in (-20, 0, 3):
        x = torch.randn(128, 256).bfloat16() * 2.0 ** (8 + k)
        x[7, 9] = -448 * 6 * 2.0**k
        tensor_scale = x.float().abs().max() / (448 * 6)
        assert tensor_scale == 2.0**k
        d, data = nvfp4_quantize(x, per_tensor_scale=tensor_scale)
        ours = quantize_nvfp4(x, Granularity(1, 16), PAYLOAD)
        assert ours.tensor_scale_inv is not None and ours.tensor_scale_inv == tensor_scale
        assert d.float().min() > 2.0**-6
        assert torch.equal(ours.scale_inv, d.float())
        assert torch.equal(stored(ours), data)


def test_the_hadamard_matrix() -> None:
    transposed = get_rht_matrix(SIGNS, "cpu", torch.float32, 16)
    assert torch.equal(hadamard(torch.eye(16)), transposed.t())
