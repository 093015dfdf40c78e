"""The three GEMMs against FP64 over independently quantised operands, with random gradients."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from fp8train.config import ConfigError, PrecisionConfig
from fp8train.models.llama import AttentionCore, Llama
from fp8train.precision import convert as convert_module
from fp8train.precision.backends.emulated import Emulated, WideAttentionCore
from fp8train.precision.backends.select import choose_backend
from fp8train.precision.convert import convert, kinds
from fp8train.precision.formats import E4M3, E5M2, Format, cast
from fp8train.precision.linear import QuantizedLinear
from fp8train.precision.quantizers import Operand, Quantizer

CPU = torch.device("cpu")
RECIPES = {
    "fp8_current": PrecisionConfig(recipe="fp8_current", include=["*"]),
    "fp8_delayed": PrecisionConfig(recipe="fp8_delayed", include=["*"]),
    "fp8_block": PrecisionConfig(recipe="fp8_block", format="e4m3", include=["*"]),
}


def dequantized(x: Tensor, fmt: Format, block: tuple[int, int] | None) -> Tensor:
    """FP64 values of the plainly quantised matrix: a loop over blocks, power-of-two scales."""
    rows, columns = block or x.shape
    out = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            tile = x[i : i + rows, j : j + columns].float()
            scale = torch.tensor(fmt.max) / tile.abs().max()
            if block:
                scale = 2.0 ** torch.floor(torch.log2(scale))
            values = cast(tile * scale, fmt).double()
            out[i : i + rows, j : j + columns] = values * (1 / scale).double()
    return out


def tiny() -> Llama:
    torch.manual_seed(0)
    return Llama(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
    )


def converted(linear: nn.Linear, precision: PrecisionConfig) -> tuple[nn.Module, object]:
    model = nn.ModuleDict({"linear": copy.deepcopy(linear)})
    conversion = convert(model, precision, CPU)
    return model["linear"], conversion


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows, k, n", [(256, 384, 128), (60, 100, 33)])
def test_against_fp64(recipe: str, compute: torch.dtype, rows: int, k: int, n: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=False).bfloat16()
    layer, conversion = converted(linear, RECIPES[recipe])
    layer.gemms = Emulated(compute)
    x = torch.randn(2, rows // 2, k).bfloat16().requires_grad_()
    g = (torch.randn(2, rows // 2, n) * 1e-3).bfloat16()
    if conversion.delayed:  # the first step has scale 1; the second uses the first's amaxes
        layer(x).backward(g)
        conversion.delayed.roll()
        x.grad = layer.weight.grad = None
    y = layer(x)
    y.backward(g)
    block = recipe == "fp8_block"
    grad_format = E4M3 if block else E5M2
    x2, g2, w = x.detach().reshape(rows, k), g.reshape(rows, n), linear.weight.detach()
    row, column, square = ((1, 128), (128, 1), (128, 128)) if block else (None,) * 3
    wq = dequantized(w, E4M3, square)
    expected = {
        "y": (y.reshape(rows, n), dequantized(x2, E4M3, row) @ wq.t()),
        "dx": (x.grad.reshape(rows, k), dequantized(g2, grad_format, row) @ wq),
        "dw": (
            layer.weight.grad,
            dequantized(g2, grad_format, column).t() @ dequantized(x2, E4M3, column),
        ),
    }
    for name, (ours, reference) in expected.items():
        assert ours.dtype == torch.bfloat16
        # FP32 accumulation differs from FP64 by far less than BF16's half ulp: equal roundings
        # but for near-ties and cancellation. A BF16 GEMM may round before the scale as well.
        error = (ours.double() - reference).abs()
        half_ulps = 1 if compute == torch.float32 else 3
        bound = half_ulps * reference.abs() * 2.0**-8 + reference.abs().max() * 2.0**-20
        assert (error <= bound).all(), name
        if compute == torch.float32:
            assert (ours == reference.bfloat16()).double().mean() > 0.99, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_close_to_high_precision(recipe: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 256, bias=True).bfloat16()
    layer, conversion = converted(linear, RECIPES[recipe])
    x = torch.randn(128, 256).bfloat16()
    if conversion.delayed:
        layer(x)
        conversion.delayed.roll()
    exact = x.double() @ linear.weight.double().t() + linear.bias.double()
    error = ((layer(x).double() - exact).norm() / exact.norm()).item()
    assert 0.01 < error < 0.05  # E4M3 is there, and does no more harm than E4M3 does


def test_scales_of_a_gemm() -> None:
    """Applied to the FP32 sum and rounded once; by a BF16 GEMM within one more rounding."""
    torch.manual_seed(0)
    a, b = torch.randint(-16, 17, (64, 96)).float(), torch.randint(-16, 17, (96, 32)).float()
    scale = torch.tensor(0.0123456789)
    exact = ((a @ b) * (scale * scale)).bfloat16()  # the sum is exact in FP32
    left, right = (Operand(m, scale) for m in (a, b))
    assert torch.equal(Emulated(torch.float32).gemm(left, right, torch.bfloat16), exact)
    left, right = (Operand(m.bfloat16(), scale) for m in (a, b))
    got = Emulated(torch.bfloat16).gemm(left, right, torch.bfloat16)
    assert ((got - exact).abs() <= exact.abs() * 2.0**-7).all()
    wide = Emulated(torch.bfloat16).gemm(left, right, torch.float32)
    assert torch.equal(wide, (a @ b) * (scale * scale))


def test_evaluation_leaves_no_amax() -> None:
    layer, conversion = converted(nn.Linear(64, 64, bias=False), RECIPES["fp8_delayed"])
    layer.eval()
    layer(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert conversion.delayed.history.abs().sum() == 0
    layer.train()
    layer(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert (conversion.delayed.history[:, 0] > 0).all()


@dataclass
class Spy:
    """A quantiser that notes what it is asked for."""

    inner: Quantizer
    asked: list[tuple[str, bool]] = field(default_factory=list)

    def __call__(self, x: Tensor, role: str, dtype: torch.dtype, **options: bool):
        self.asked.append((role, options["columnwise"]))
        return self.inner(x, role, dtype, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_what_is_needed_is_computed(recipe: str) -> None:
    layer, _ = converted(nn.Linear(128, 128, bias=False), RECIPES[recipe])
    layer.quantizer = spy = Spy(layer.quantizer)
    layer(torch.randn(8, 128)).square().sum().backward()  # a first layer: no dgrad
    assert layer.weight.grad.abs().sum() > 0
    assert spy.asked == [("input", True), ("weight", False), ("grad_output", True)]
    spy.asked.clear()
    layer.weight.requires_grad_(False)
    x = torch.randn(8, 128, requires_grad=True)
    layer(x).square().sum().backward()  # a frozen layer: no wgrad
    assert x.grad.abs().sum() > 0
    assert spy.asked == [("input", False), ("weight", True), ("grad_output", False)]
    spy.asked.clear()
    layer.weight.requires_grad_(True)
    with torch.no_grad():
        layer(x)
    assert spy.asked == [("input", False), ("weight", False)]


def test_a_second_derivative_is_an_error() -> None:
    layer, _ = converted(nn.Linear(16, 16, bias=False), RECIPES["fp8_current"])
    x = torch.randn(4, 16, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_converted_layer_keeps_its_mode() -> None:
    linear = nn.Linear(16, 16, bias=False).eval()
    layer, _ = converted(linear, RECIPES["fp8_current"])
    assert not layer.training


def test_a_lone_scale_is_applied() -> None:
    a, b = Operand(torch.ones(2, 2), torch.tensor(0.5)), Operand(torch.eye(2))
    for left, right in ((a, b), (b, a)):
        assert torch.equal(
            Emulated(torch.float32).gemm(left, right, torch.float32), torch.full((2, 2), 0.5)
        )


# --- which layers ------------------------------------------------------------------------------


def test_the_blocks_linears_are_chosen() -> None:
    model = tiny()
    conversion = convert(model, PrecisionConfig(recipe="fp8_current"), CPU)
    assert len(conversion.layers) == 14
    assert all(name.startswith("layers.") for name in conversion.layers)
    assert ("lm_head", 1, "bf16", "BF16") in conversion.table
    assert ("layers.*.mlp.up_proj", 2, "fp8_current", "E4M3/E4M3/E5M2") in conversion.table
    assert isinstance(model.layers[0].mlp.up_proj, QuantizedLinear)


def test_exclude() -> None:
    precision = PrecisionConfig(recipe="fp8_block", format="e4m3", exclude=["*.down_proj"])
    conversion = convert(tiny(), precision, CPU)
    assert len(conversion.layers) == 12
    assert ("layers.*.mlp.down_proj", 2, "bf16", "BF16") in conversion.table


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error(key: str) -> None:
    precision = PrecisionConfig(recipe="fp8_current", **{key: ["layers.*.mlp.up"]})
    with pytest.raises(ConfigError, match=r"layers\.\*\.mlp\.up matches no .*mlp\.up_proj"):
        convert(tiny(), precision, CPU)


def test_patterns_that_leave_nothing_are_an_error() -> None:
    with pytest.raises(ConfigError, match="leaves no layer"):
        convert(tiny(), PrecisionConfig(recipe="fp8_current", exclude=["*"]), CPU)


def test_fp32_converts_nothing() -> None:
    model = tiny()
    conversion = convert(model, PrecisionConfig(recipe="fp32"), CPU, AttentionCore)
    assert not conversion.layers
    assert not any(isinstance(m, QuantizedLinear | WideAttentionCore) for m in model.modules())
    assert any(isinstance(m, AttentionCore) for m in model.modules())


def test_bf16_without_fast_gemms_converts_head_and_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fast, expected in ((True, 0), (False, 2)):
        monkeypatch.setattr(convert_module, "has_fast_bf16", lambda device, fast=fast: fast)
        model = tiny()
        convert(model, PrecisionConfig(recipe="bf16"), CPU, AttentionCore)
        assert sum(isinstance(m, WideAttentionCore) for m in model.modules()) == expected
        assert isinstance(model.lm_head, QuantizedLinear) is not fast


def test_wide_attention_is_bf16_attention_rounded_once() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8).bfloat16() for heads in (4, 2, 2))
    exact = AttentionCore()(q.double(), k.double(), v.double())
    ours = WideAttentionCore()(q, k, v)
    assert (ours.double() - exact).abs().max() < 2.0**-8 * exact.abs().max()
    assert (ours == exact.bfloat16()).double().mean() > 0.99


def test_kinds() -> None:
    assert kinds(["layers.0.a", "layers.11.a", "head"]) == ["layers.*.a", "head"]


@pytest.mark.parametrize("backend", ["torch", "transformer_engine"])
def test_a_gpu_backend_is_refused_on_a_cpu(backend: str) -> None:
    precision = PrecisionConfig(recipe="fp8_current", backend=backend)
    with pytest.raises(ConfigError, match=f"precision.backend={backend} needs a CUDA GPU"):
        choose_backend(precision, CPU)
    assert choose_backend(PrecisionConfig(recipe="fp8_current"), CPU) == "emulated"
