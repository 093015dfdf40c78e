"""The three GEMMs against FP64 over independently quantised operands, with random gradients."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from fp8train.config import RECIPES, PrecisionConfig
from fp8train.precision.backends.emulated import Emulated
from fp8train.precision.convert import Conversion, convert
from fp8train.precision.formats import E4M3, E5M2, Format, cast
from fp8train.precision.kernels import hopper
from fp8train.precision.linear import QuantizedLinear
from fp8train.precision.quantizers import Operand, Quantizer
from fp8train.precision.recipes import OPERANDS, ROLES
from fp8train.precision.tensor import COLUMN, ROW, TENSOR, Granularity, QuantizedTensor

CPU = torch.device("cpu")
WHOLE = (10**9, 10**9)


def precision(recipe: str, **options: object) -> PrecisionConfig:
    return PrecisionConfig(recipe=recipe, include=["*"], **options)


def dequantized(x: Tensor, fmt: Format, block: tuple[int, int], rule: str) -> Tensor:
    """FP64 values of the plainly quantised matrix: a loop over blocks."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            tile = x[i : i + block[0], j : j + block[1]].float()
            ratio = torch.tensor(fmt.max) / tile.abs().max()
            scale = ratio.item()
            if rule == "down":
                scale = 2.0 ** math.floor(math.log2(scale))
            if rule == "mx":  # the inverse rounded up, so the scale down, but of amax / max
                scale = 2.0 ** -math.ceil(math.log2(tile.abs().max().item() / fmt.max))
            values = cast(tile * scale, fmt).double()
            inverse = torch.tensor(1.0) / torch.tensor(scale)  # FP32, as it is stored
            out[i : i + tile.shape[0], j : j + tile.shape[1]] = values * inverse.double()
    return out


# recipe → for each operand of fprop, dgrad, wgrad its format, block and rule; None is BF16.
Plan = tuple[Format, tuple[int, int], str] | None
TENSORWISE = [(E4M3, WHOLE, "plain")] * 2
PLANS: dict[str, list[list[Plan]]] = {
    "fp8_current": [
        TENSORWISE,
        [(E5M2, WHOLE, "plain"), (E4M3, WHOLE, "plain")],
        [(E5M2, WHOLE, "plain"), (E4M3, WHOLE, "plain")],
    ],
    "fp8_rowwise": [
        [(E4M3, (1, 10**9), "down"), (E4M3, (1, 10**9), "down")],
        [(E4M3, (1, 10**9), "down"), (E4M3, (10**9, 1), "down")],
        [(E4M3, (10**9, 1), "down"), (E4M3, (10**9, 1), "down")],
    ],
    "fp8_rowwise_bf16_wgrad": [
        [(E4M3, (1, 10**9), "down"), (E4M3, (1, 10**9), "down")],
        [(E4M3, (1, 10**9), "down"), (E4M3, WHOLE, "down")],
        [None, None],
    ],
    "fp8_block": [
        [(E4M3, (1, 128), "down"), (E4M3, (128, 128), "down")],
        [(E4M3, (1, 128), "down"), (E4M3, (128, 128), "down")],
        [(E4M3, (128, 1), "down"), (E4M3, (128, 1), "down")],
    ],
    "mxfp8": [
        [(E4M3, (1, 32), "mx"), (E4M3, (1, 32), "mx")],
        [(E4M3, (1, 32), "mx"), (E4M3, (32, 1), "mx")],
        [(E4M3, (32, 1), "mx"), (E4M3, (32, 1), "mx")],
    ],
}
PLANS["fp8_delayed"] = PLANS["fp8_current"]


def converted(linear: nn.Linear, config: PrecisionConfig) -> tuple[QuantizedLinear, Conversion]:
    model = nn.ModuleDict({"linear": copy.deepcopy(linear)})
    conversion = convert(model, config, CPU)
    layer = model["linear"]
    assert isinstance(layer, QuantizedLinear)
    return layer, conversion


def use(layer: QuantizedLinear, gemms: Emulated) -> None:
    """Have the layer compute with other GEMMs."""
    layer.numerics.gemms = gemms
    for quantizer in layer.numerics.quantizers.values():
        quantizer.payload = gemms.payload


def warm_up(layer: nn.Module, conversion: Conversion, x: Tensor, g: Tensor) -> None:
    """Under delayed scaling the first step has scale 1; the second uses the first's amaxes."""
    if conversion.delayed:
        layer(x).backward(g)
        conversion.end_step()
        x.grad = layer.weight.grad = None


COMPUTE = {
    "fp32": Emulated(torch.float32),
    "bf16": Emulated(torch.bfloat16),
    "exact": Emulated(torch.float32, exact=True),
}


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("recipe", PLANS)
@pytest.mark.parametrize("rows, k, n", [(256, 384, 128), (60, 100, 33), (4, 36, 10)])
def test_against_fp64(recipe: str, compute: str, rows: int, k: int, n: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=False).bfloat16()
    layer, conversion = converted(linear, precision(recipe))
    use(layer, COMPUTE[compute])
    x = torch.randn(2, rows // 2, k).bfloat16().requires_grad_()
    g = (torch.randn(2, rows // 2, n) * 1e-3).bfloat16()
    warm_up(layer, conversion, x, g)
    y = layer(x)
    y.backward(g)
    tensors = {
        "input": x.detach().reshape(rows, k),
        "grad_output": g.reshape(rows, n),
        "weight": linear.weight.detach(),
    }
    sides = [
        [
            tensors[role].double() if plan is None else dequantized(tensors[role], *plan)
            for (role, _), plan in zip(operands, plans, strict=True)
        ]
        for operands, plans in zip(OPERANDS.values(), PLANS[recipe], strict=True)
    ]
    expected = {
        "y": (y.reshape(rows, n), sides[0][0] @ sides[0][1].t()),
        "dx": (x.grad.reshape(rows, k), sides[1][0] @ sides[1][1]),
        "dw": (layer.weight.grad, sides[2][0].t() @ sides[2][1]),
    }
    for name, (ours, reference) in expected.items():
        assert ours.dtype == torch.bfloat16
        # FP32 accumulation differs from FP64 by far less than BF16's half ulp: equal roundings
        # but for near-ties and cancellation. A BF16 GEMM may round before the scale as well.
        error = (ours.double() - reference).abs()
        half_ulps = 3 if compute == "bf16" else 1
        bound = half_ulps * reference.abs() * 2.0**-8 + reference.abs().max() * 2.0**-20
        assert (error <= bound).all(), name
        if compute != "bf16":
            assert (ours == reference.bfloat16()).double().mean() > 0.99, name


@dataclass
class SpyGemms:
    """GEMMs that note their operands."""

    inner: Emulated
    seen: dict[str, tuple[Operand, Operand, Tensor]] = field(default_factory=dict)

    def gemm(self, kind: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        result = self.inner.gemm(kind, a, b, dtype)
        self.seen[kind] = a, b, result
        return result


def high(operand: Operand) -> Tensor:
    quantized = isinstance(operand, QuantizedTensor)
    return operand.dequantize(torch.float64) if quantized else operand.double()


VARIANTS = [
    {},
    {"power_of_two_scales": False},
    {"bf16_inputs": ["*"]},
    {"format": "hybrid"},
    {"stochastic_rounding": ["input", "weight", "grad_output"]},
    {"accumulate": "hopper"},
    {"emulation": "exact"},
]


def allowed(recipe: str, options: dict) -> bool:
    """Whether rules.check lets the option pass with the recipe."""
    if recipe in ("mxfp8", "nvfp4", "mxfp4") and options.keys() & {
        "accumulate",
        "power_of_two_scales",
    }:
        return False
    return not (recipe in ("nvfp4", "mxfp4") and "format" in options)


CASES = [(r, o) for r, o in itertools.product(RECIPES, VARIANTS) if allowed(r, o)]


@pytest.mark.parametrize("recipe, options", CASES, ids=str)
def test_a_gemm_multiplies_what_its_operands_stand_for(recipe: str, options: dict) -> None:
    """Whatever the recipe and its options: the result is the product of the dequantised."""
    torch.manual_seed(0)
    layer, conversion = converted(
        nn.Linear(150, 70, bias=False).bfloat16(), precision(recipe, **options)
    )
    x = torch.randn(100, 150).bfloat16().requires_grad_()
    g = torch.randn(100, 70).bfloat16()
    warm_up(layer, conversion, x, g)
    spy = layer.numerics.gemms = SpyGemms(layer.numerics.gemms)
    layer(x).backward(g)
    assert spy.seen.keys() == {"fprop", "dgrad", "wgrad"}
    loss = 2.0**-10 if "accumulate" in options else 2.0**-20  # Hopper's 14 bits
    for kind, (a, b, result) in spy.seen.items():
        left, right = high(a), high(b)
        exact = {
            "fprop": lambda a, b: a @ b.t(),
            "dgrad": lambda a, b: a @ b,
            "wgrad": lambda a, b: a.t() @ b,
        }[kind](left, right)
        error = (result.double() - exact).abs()
        assert (error <= exact.abs() * 2.0**-8 + exact.abs().max() * loss).all(), kind
    quantized = {role: False for role in ROLES}
    for kind, (a, b, _) in spy.seen.items():
        for (role, _), operand in zip(OPERANDS[kind], (a, b), strict=True):
            quantized[role] |= isinstance(operand, QuantizedTensor)
    assert quantized["weight"]
    assert quantized["input"] == ("bf16_inputs" not in options and recipe != "mxfp4")
    assert quantized["grad_output"] == (recipe != "mxfp4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_close_to_high_precision(recipe: str) -> None:
    """The formats are there, and do no more harm than they do: output and both gradients."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 256, bias=True).bfloat16()
    layer, conversion = converted(linear, precision(recipe))
    x = torch.randn(128, 256).bfloat16().requires_grad_()
    g = torch.randn(128, 256).bfloat16()
    warm_up(layer, conversion, x, g)
    y = layer(x)
    y.backward(g)
    w, x2, g2 = linear.weight.double(), x.detach().double(), g.double()
    four_bits = recipe in ("nvfp4", "mxfp4")
    for kind, ours, exact in (
        ("fprop", y, x2 @ w.t() + linear.bias.double()),
        ("dgrad", x.grad, g2 @ w),
        ("wgrad", layer.weight.grad, g2.t() @ x2),
    ):
        error = ((ours.double() - exact).norm() / exact.norm()).item()
        low, most = (0.08, 0.22) if four_bits else (0.01, 0.07)
        if kind == "wgrad" and recipe in ("mxfp4", "fp8_rowwise_bf16_wgrad"):
            low, most = 0.0, 0.003
        assert low < error < most, kind


@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_fast_accumulation_is_for_fprop_alone(kind: str) -> None:
    torch.manual_seed(0)
    left, right = (cast(torch.randn(512, 512), E4M3).float() for _ in range(2))
    one = torch.tensor(1.0)
    ours = Emulated(torch.float32, accumulate="hopper").gemm(
        kind, per_tensor(left, one), per_tensor(right, one), torch.float32
    )
    a = left.t() if kind == "wgrad" else left
    b = right.t() if kind == "fprop" else right
    promote = {True: None, False: 128}
    fast, split = (hopper.gemm(a, b, (E4M3, E4M3), promote=promote[f]) for f in (True, False))
    assert not torch.equal(fast, split)
    assert torch.equal(ours, fast if kind == "fprop" else split)


def test_scales_whose_product_leaves_the_range_of_fp32() -> None:
    """Applied one after another, so that a result that FP32 holds is held."""
    for exponent in (-75, 66):
        scale = torch.tensor(1.3 * 2.0**exponent)
        a, b = torch.full((4, 64), 448.0), torch.full((4, 64), 448.0)
        if exponent > 0:
            a = torch.zeros(4, 64)
        got = Emulated(torch.float32, exact=True).gemm(
            "fprop", per_tensor(a, scale), per_tensor(b, scale), torch.float32
        )
        exact = (a.double() @ b.double().t()) * scale.double() * scale.double()
        assert torch.allclose(got.double(), exact, rtol=2.0**-22, atol=0)


def test_straight_through_gradient_by_finite_differences() -> None:
    """Values on the grid at a scale of one: quantisation is the identity, and so the gradients
    must be those of the plain product, which finite differences in FP64 give."""
    torch.manual_seed(0)
    grid = torch.tensor([-448.0, -2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0, 448.0])
    x, w, g = (grid[torch.randint(1, 9, shape)] for shape in ((8, 6), (4, 6), (8, 4)))
    for tensor in (x, w, g):
        tensor[0, 0] = 448.0  # the amax, so that the scale is one
    layer, _ = converted(nn.Linear(6, 4, bias=False), precision("fp8_current", format="e4m3"))
    layer.weight.data = w.clone()
    x.requires_grad_()
    layer(x).backward(g)

    def loss(x: Tensor, w: Tensor) -> float:
        return ((x.double() @ w.double().t()) * g.double()).sum().item()

    for tensor, gradient in ((x, x.grad), (w, layer.weight.grad)):
        for i, j in itertools.product(*map(range, tensor.shape)):
            step = torch.zeros_like(tensor, dtype=torch.float64)
            step[i, j] = 0.25
            ends = [loss(x + s, w) if tensor is x else loss(x, w + s) for s in (step, -step)]
            assert gradient[i, j].item() == pytest.approx((ends[0] - ends[1]) / 0.5, rel=1e-6)


def per_tensor(values: Tensor, scale: Tensor) -> QuantizedTensor:
    return QuantizedTensor(values, scale.view(1, 1), E4M3, TENSOR)


def test_scales_of_a_gemm() -> None:
    """Applied to the FP32 sum and rounded once; by a BF16 GEMM within one more rounding."""
    torch.manual_seed(0)
    a, b = torch.randint(-16, 17, (64, 96)).float(), torch.randint(-16, 17, (96, 32)).float()
    scale = torch.tensor(0.0123456789)
    exact = ((a @ b) * (scale * scale)).bfloat16()  # the sum is exact in FP32
    left, right = (per_tensor(m, scale) for m in (a, b))
    assert torch.equal(Emulated(torch.float32).gemm("dgrad", left, right, torch.bfloat16), exact)
    left, right = (per_tensor(m.bfloat16(), scale) for m in (a, b))
    got = Emulated(torch.bfloat16).gemm("dgrad", left, right, torch.bfloat16)
    assert ((got - exact).abs() <= exact.abs() * 2.0**-7).all()
    wide = Emulated(torch.bfloat16).gemm("dgrad", left, right, torch.float32)
    assert torch.equal(wide, (a @ b) * (scale * scale))


def test_a_lone_scale_is_applied() -> None:
    a, b = per_tensor(torch.ones(2, 2), torch.tensor(0.5)), torch.eye(2)
    for left, right in ((a, b), (b, a)):
        result = Emulated(torch.float32).gemm("dgrad", left, right, torch.float32)
        assert torch.equal(result, torch.full((2, 2), 0.5))


def test_row_and_column_scales_go_to_their_side() -> None:
    torch.manual_seed(0)
    a, b = torch.randint(-8, 9, (5, 7)).float(), torch.randint(-8, 9, (7, 3)).float()
    up, across = torch.rand(5, 1), torch.rand(1, 3)
    left = QuantizedTensor(a, up, E4M3, ROW)
    right = QuantizedTensor(b, across, E4M3, COLUMN)
    result = Emulated(torch.float32).gemm("dgrad", left, right, torch.float32)
    assert torch.equal(result, (a @ b) * up * across)


@pytest.mark.parametrize("accumulate", ["fp32", "hopper"])
def test_the_order_of_scales_is_the_same_with_a_single_block(accumulate: str) -> None:
    """(P · s_left) · s_right, where one block covers all of K and N."""
    torch.manual_seed(0)
    a, b = torch.randint(-4, 5, (64, 100)).float(), torch.randint(-4, 5, (50, 100)).float()
    left = QuantizedTensor(a, torch.rand(64, 1), E4M3, Granularity(1, 128))
    right = QuantizedTensor(b, torch.rand(1, 1), E4M3, Granularity(128, 128))
    gemms = Emulated(torch.float32, accumulate=accumulate)
    result = gemms.gemm("fprop", left, right, torch.float32)
    assert torch.equal(result, ((a @ b.t()) * left.scale_inv) * right.scale_inv)


@pytest.mark.parametrize("accumulate", ["fp32", "hopper"])
def test_block_scales_are_applied_to_each_partial_sum(accumulate: str) -> None:
    """FP32 block scales: y = fma(P · s_left, s_right, y) over the blocks of the reduction."""
    torch.manual_seed(0)
    a, b = torch.randint(-4, 5, (6, 300)).float(), torch.randint(-4, 5, (130, 300)).float()
    left = QuantizedTensor(a, torch.rand(6, 3), E4M3, Granularity(1, 128))
    right = QuantizedTensor(b, torch.rand(2, 3), E4M3, Granularity(128, 128))
    result = Emulated(torch.float32, accumulate=accumulate).gemm(
        "fprop", left, right, torch.float32
    )
    expected = torch.zeros(6, 130)
    for m, n in itertools.product(range(6), range(130)):  # FP64 rounds twice as rarely as 2^-29
        y = torch.tensor(0.0)
        for block in range(3):
            part = slice(128 * block, 128 * (block + 1))
            p = (a[m, part] @ b[n, part]) * left.scale_inv[m, block]
            y = (p.double() * right.scale_inv[n // 128, block].double() + y.double()).float()
        expected[m, n] = y
    assert torch.equal(result, expected)  # sums of a block are exact here, in 14 bits too


def test_exact_emulation_covers_values_that_a_fold_would_flush() -> None:
    """MX blocks at the bottom and top of the range: E = 0 and products below 2^-126."""
    torch.manual_seed(0)
    x = torch.randn(8, 64) * 2.0**-125
    w = torch.randn(16, 64) * 2.0**60
    layer, _ = converted(nn.Linear(64, 16, bias=False), precision("mxfp8", emulation="exact"))
    layer.weight.data = w
    spy = layer.numerics.gemms = SpyGemms(layer.numerics.gemms)
    y = layer(x)
    a, b, _ = spy.seen["fprop"]
    assert not a.folded and not b.folded
    assert torch.allclose(y.double(), high(a) @ high(b).t(), rtol=1e-6, atol=0)
    near, _ = converted(nn.Linear(64, 16, bias=False), precision("mxfp8", emulation="exact"))
    near.numerics.gemms = spy = SpyGemms(near.numerics.gemms)
    near(torch.randn(8, 64))
    assert spy.seen["fprop"][0].folded  # in the ordinary range one GEMM does it


# --- what leaves a trace ------------------------------------------------------------------------


def test_evaluation_leaves_no_amax() -> None:
    layer, conversion = converted(nn.Linear(64, 64, bias=False), precision("fp8_delayed"))
    layer.eval()
    layer(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert conversion.delayed.history.abs().sum() == 0
    layer.train()
    layer(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert (conversion.delayed.history[:, 0] > 0).all()


def test_delayed_scaling_with_two_formats_of_a_role() -> None:
    """Each copy has a scale of its own, from the same amaxes."""
    config = precision("fp8_delayed")
    config.formats.wgrad.input = "e5m2"
    layer, conversion = converted(nn.Linear(64, 64, bias=False), config)
    x = torch.randn(8, 64, requires_grad=True)
    warm_up(layer, conversion, x, torch.randn(8, 64))
    scales = conversion.delayed.state_dict()
    largest = x.abs().max()
    assert scales["linear.input.scale"].item() == (torch.tensor(448.0) / largest).item()
    assert (
        scales["linear.input.columnwise.scale"].item() == (torch.tensor(57344.0) / largest).item()
    )
    spy = layer.numerics.gemms = SpyGemms(layer.numerics.gemms)
    layer(x).backward(torch.randn(8, 64))
    assert spy.seen["fprop"][0].fmt == E4M3
    assert spy.seen["wgrad"][1].fmt == E5M2


@dataclass
class Spy:
    """A quantiser that notes what it is asked for."""

    inner: Quantizer
    role: str
    asked: list[tuple[str, bool, bool]]

    def __call__(self, x: Tensor, **options: object) -> tuple[Operand | None, Operand | None]:
        self.asked.append((self.role, options["rowwise"], options["columnwise"]))
        return self.inner(x, **options)


def spy_on(layer: QuantizedLinear) -> list[tuple[str, bool, bool]]:
    asked: list[tuple[str, bool, bool]] = []
    quantizers = layer.numerics.quantizers
    layer.numerics.quantizers = {r: Spy(q, r, asked) for r, q in quantizers.items()}
    return asked


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_what_is_needed_is_computed(recipe: str) -> None:
    layer, _ = converted(nn.Linear(128, 128, bias=False), precision(recipe))
    asked = spy_on(layer)
    layer(torch.randn(8, 128)).square().sum().backward()  # a first layer: no dgrad
    assert layer.weight.grad.abs().sum() > 0
    assert asked == [
        ("input", True, True),
        ("weight", True, False),
        ("grad_output", False, True),
    ]
    asked.clear()
    layer.weight.requires_grad_(False)
    x = torch.randn(8, 128, requires_grad=True)
    layer(x).square().sum().backward()  # a frozen layer: no wgrad
    assert x.grad.abs().sum() > 0
    assert asked == [
        ("input", True, False),
        ("weight", True, True),
        ("grad_output", True, False),
    ]
    asked.clear()
    layer.weight.requires_grad_(True)
    with torch.no_grad():
        layer(x)
    assert asked == [("input", True, False), ("weight", True, False)]


# --- the weight cache ---------------------------------------------------------------------------


def train(config: PrecisionConfig) -> tuple[list[Tensor], int, Conversion]:
    """Three steps of two micro batches, one of them skipped, with an evaluation in between:
    outputs, gradients and weights, how often weights were quantised, the conversion."""
    torch.manual_seed(0)
    layer, conversion = converted(nn.Linear(64, 32, bias=False), config)
    asked = spy_on(layer)
    seen = []
    for step in range(4):
        for micro in range(2):
            conversion.begin_micro_batch(step, 2 * step + micro)
            x = torch.randn(16, 64, requires_grad=True)
            y = layer(x)
            y.backward(torch.randn(16, 32))
            seen += [y.detach(), x.grad]
        skipped = step == 1
        if not skipped:
            with torch.no_grad():
                layer.weight -= 0.1 * layer.weight.grad
        seen += [layer.weight.grad.clone(), layer.weight.detach().clone()]
        layer.weight.grad = None
        conversion.end_step(skipped=skipped)
        layer.eval()
        with torch.no_grad():
            seen.append(layer(torch.randn(4, 64)))
        layer.train()
    return seen, sum(role == "weight" for role, *_ in asked), conversion


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_weight_cache_changes_nothing_but_the_work(recipe: str, stochastic: bool) -> None:
    roles = list(ROLES) if stochastic else None
    plain, often, conversion = train(precision(recipe, stochastic_rounding=roles))
    cached, seldom, other = train(precision(recipe, stochastic_rounding=roles, cache_weights=True))
    assert all(map(torch.equal, plain, cached))
    assert often == 4 * (2 + 1) and seldom == 4 * (1 + 1)
    if conversion.delayed:
        assert torch.equal(conversion.delayed.history, other.delayed.history)
        assert torch.equal(conversion.delayed.scale, other.delayed.scale)


# --- Smooth-SwiGLU ------------------------------------------------------------------------------


def down_proj(config: PrecisionConfig) -> tuple[QuantizedLinear, Conversion]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"down_proj": nn.Linear(64, 32, bias=False)})})
    conversion = convert(model, config, CPU)
    return model["mlp"]["down_proj"], conversion


def test_smooth_swiglu_keeps_the_function_and_saves_the_small_channels() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    x[:, 7] *= 2.0**20  # an outlier channel: per tensor, the others flush to zero
    x[:, 0] = 0.0
    x[:, 1] *= 2.0**-100
    errors = {}
    for smooth in (False, True):
        layer, _ = down_proj(precision("fp8_current", smooth_swiglu=smooth))
        layer.weight.data[:, 7] *= 2.0**-20  # so that every channel matters alike
        exact = x.double() @ layer.weight.double().t()
        errors[smooth] = ((layer(x).double() - exact).norm() / exact.norm()).item()
    assert errors[False] > 0.3 and errors[True] < 0.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_smooth_swiglu_gradients_are_those_of_the_plain_product(recipe: str) -> None:
    """In every channel, however large or small: levelling is no business of dgrad."""
    torch.manual_seed(1)
    x = (torch.randn(64, 64) * 2.0 ** torch.randint(-18, 18, (64,))).requires_grad_()
    g = torch.randn(64, 32)
    layer, conversion = down_proj(precision(recipe, smooth_swiglu=True))
    warm_up(layer, conversion, x, g)
    layer(x).backward(g)
    for ours, exact in (
        (x.grad, g.double() @ layer.weight.double()),
        (layer.weight.grad, g.double().t() @ x.double()),
    ):
        relative = (ours.double() - exact).norm(dim=0) / exact.norm(dim=0)
        assert (relative < (0.35 if recipe in ("nvfp4", "mxfp4") else 0.1)).all()


# --- the module ---------------------------------------------------------------------------------


def test_a_second_derivative_is_an_error() -> None:
    layer, _ = converted(nn.Linear(16, 16, bias=False), precision("fp8_current"))
    x = torch.randn(4, 16, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_converted_layer_keeps_its_mode() -> None:
    linear = nn.Linear(16, 16, bias=False).eval()
    layer, _ = converted(linear, precision("fp8_current"))
    assert not layer.training


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 5, 32), (32,)])
def test_leading_sizes(recipe: str, shape: tuple[int, ...]) -> None:
    """As nn.Linear takes them: none, one, several; an empty batch too."""
    layer, _ = converted(nn.Linear(32, 8, bias=True), precision(recipe))
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], 8)
    y.backward(torch.randn_like(y))
    assert x.grad.shape == x.shape and x.grad.isfinite().all()


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values in other memory layouts."""
    gaps = torch.zeros(2 * x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    gaps[::2, ::2] = x
    return {"transposed": x.t().contiguous().t(), "strided": gaps[::2, ::2]}


@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_layout_changes_nothing(recipe: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 20, bias=False).bfloat16()
    base, grad = torch.randn(33, 48).bfloat16(), torch.randn(33, 20).bfloat16()

    def run(x: Tensor, g: Tensor, weight: Tensor) -> list[Tensor]:
        layer, _ = converted(linear, precision(recipe))
        layer.weight = nn.Parameter(weight)
        x = x.detach().requires_grad_()
        y = layer(x)
        y.backward(g)
        return [y.detach(), x.grad, layer.weight.grad]

    expected = run(base, grad, linear.weight.detach())
    others = [layouts(m) for m in (base, grad, linear.weight.detach())]
    for kind in others[0]:
        assert all(map(torch.equal, expected, run(*(other[kind] for other in others)))), kind


def test_stochastic_rounding_is_a_function_of_its_place() -> None:
    """Same seed, step and micro batch: same draws; another of any: others. A rank's rows draw
    what the whole batch draws there."""
    config = precision("fp8_rowwise", stochastic_rounding=["grad_output"])
    x, g = torch.randn(64, 32), torch.randn(64, 16)

    def dx(seed: int, micro_batch: int, rows: slice = slice(None)) -> Tensor:
        torch.manual_seed(0)
        model = nn.ModuleDict({"linear": nn.Linear(32, 16, bias=False)})
        conversion = convert(model, config, CPU, seed=seed)
        conversion.begin_micro_batch(0, micro_batch, torch.arange(64)[rows].view(1, -1))
        part = x[rows].clone().requires_grad_()
        model["linear"](part).backward(g[rows])
        return part.grad

    assert torch.equal(dx(1, 0), dx(1, 0))
    assert not torch.equal(dx(1, 0), dx(2, 0))
    assert not torch.equal(dx(1, 0), dx(1, 1))
    assert torch.equal(dx(1, 0)[48:], dx(1, 0, slice(48, 64)))


def test_stochastic_gradients_are_unbiased() -> None:
    """The mean over many draws comes near the exact product; nearest rounding stays off."""
    torch.manual_seed(0)
    x, g = torch.randn(8, 32), torch.randn(8, 16)
    layers: dict[str, Callable[[], QuantizedLinear]] = {
        rounding: lambda roles=roles: converted(
            nn.Linear(32, 16, bias=False), precision("fp8_current", stochastic_rounding=roles)
        )
        for rounding, roles in (("nearest", []), ("stochastic", ["grad_output"]))
    }
    errors = {}
    for rounding, make in layers.items():
        torch.manual_seed(1)
        layer, conversion = make()
        total = torch.zeros(8, 32, dtype=torch.float64)
        exact = torch.zeros(8, 32, dtype=torch.float64)
        for draw in range(100):
            conversion.begin_micro_batch(0, draw)
            part = x.clone().requires_grad_()
            spy = layer.numerics.gemms = SpyGemms(Emulated(torch.float32))
            layer(part).backward(g)
            total += part.grad.double() / 100
            exact = g.double() @ high(spy.seen["dgrad"][1])
        errors[rounding] = ((total - exact).norm() / exact.norm()).item()
    assert errors["stochastic"] < errors["nearest"] / 4
