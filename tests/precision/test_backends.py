"""Which backend runs what, and the `torch` backend: on a CPU as it is; for the GPU's recipes the
operands that its kernels would get."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8train.config import RECIPES, ConfigError, LayerRecipeConfig, PrecisionConfig
from fp8train.precision.backends.emulated import Emulated
from fp8train.precision.backends.select import choose, choose_backend, load_backend
from fp8train.precision.backends.support import BACKENDS, Machine, why_not
from fp8train.precision.backends.torch_gemms import Call, Packed, TorchGemms, swizzle
from fp8train.precision.convert import Conversion, convert
from fp8train.precision.formats import decode
from fp8train.precision.quantizers import Operand, Position, Scaled
from fp8train.precision.recipes import DEFAULTS, OPERANDS, BlockScaling, Recipe
from fp8train.precision.tensor import QuantizedTensor

CPU = torch.device("cpu")
ON_CPU = ("fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_rowwise_bf16_wgrad")
ON_GPU = ("fp8_block", "mxfp8", "nvfp4")


def precision(recipe: str, **options: Any) -> PrecisionConfig:
    config = PrecisionConfig(recipe=recipe, include=["*"], **options)
    if recipe == "fp8_delayed":
        config.amax_history_length = 2
    return config


# --- the table and its refusals ------------------------------------------------------------------

RUNS = {  # compute capability → what torch and Transformer Engine run there
    None: (ON_CPU, ()),
    (8, 0): ((), ()),
    (8, 9): (ON_CPU, ("fp8_delayed", "fp8_current")),
    (9, 0): ((*ON_CPU, "fp8_block"), ("fp8_delayed", "fp8_current", "fp8_block")),
    (10, 0): (
        (*ON_CPU, "mxfp8", "nvfp4"),
        ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"),
    ),
    (12, 0): (
        (*ON_CPU, "mxfp8", "nvfp4"),
        ("fp8_delayed", "fp8_current", "fp8_block", "nvfp4"),
    ),
}


def machine(capability: tuple[int, int] | None, **changes: Any) -> Machine:
    facts: dict[str, Any] = {
        "torch_version": "2.13.0",
        "cuda_version": "13.0",
        "te_version": "2.20",
    }
    return Machine("cuda" if capability else "cpu", capability, **(facts | changes))


@pytest.mark.parametrize("capability", RUNS, ids=str)
def test_what_runs_where(capability: tuple[int, int] | None) -> None:
    here = machine(capability)
    runs = {b: tuple(r for r in RECIPES if why_not(b, r, here) is None) for b in BACKENDS}
    assert runs == dict(zip(BACKENDS, (RECIPES, *RUNS[capability]), strict=True))
    for backend, recipe in itertools.product(BACKENDS, RECIPES):
        config = precision(recipe, backend=backend)
        if recipe in runs[backend]:
            assert choose(config, here) == backend
            continue
        with pytest.raises(ConfigError) as refused:
            choose(config, here)
        line = str(refused.value)
        assert f"precision.backend={backend}" in line
        assert "precision.backend=emulated" in line
        assert "\n" not in line
        assert choose(precision(recipe), here) == "emulated"  # auto


@pytest.mark.parametrize(
    ("backend", "recipe", "here", "reason"),
    [
        (
            "torch",
            "mxfp8",
            machine((9, 0)),
            "mxfp8 needs compute capability 10.0 or above; this GPU is 9.0; here torch runs "
            "fp8_delayed, fp8_current, fp8_rowwise, fp8_rowwise_bf16_wgrad, fp8_block; use "
            "another precision, or precision.backend=emulated",
        ),
        ("torch", "fp8_block", machine((10, 0)), "needs compute capability 9.x; this GPU is 10.0"),
        ("torch", "nvfp4", machine(None), "nvfp4 needs a CUDA GPU; this is a CPU; here torch runs"),
        ("torch", "mxfp4", machine((10, 0)), "torch has no mxfp4; here torch runs fp8_delayed"),
        ("torch", "fp8_current", machine((8, 0)), "8.9 or above; this GPU is 8.0; use precision."),
        (
            "torch",
            "fp8_rowwise",
            machine(None, torch_version="2.11.0a0+nv26.3"),
            "fp8_rowwise needs torch 2.13 on a CPU; this is 2.11.0a0+nv26.3; here torch runs "
            "fp8_delayed, fp8_current; use",
        ),
        (
            "torch",
            "fp8_current",
            machine((9, 0), torch_version="2.10.1"),
            "torch needs torch 2.11; this is 2.10.1; use precision.backend=emulated",
        ),
        (
            "torch",
            "fp8_block",
            machine((9, 0), cuda_version="12.8"),
            "fp8_block needs CUDA 12.9; torch's is 12.8",
        ),
        (
            "torch",
            "fp8_current",
            machine((9, 4), cuda_version=None),
            "fp8_current needs CUDA 12.1; this torch is built without it; use precision.",
        ),
        (
            "transformer_engine",
            "mxfp8",
            machine((12, 0)),
            "mxfp8 needs compute capability 10.0 or above and below 12.0; this GPU is 12.0",
        ),
        (
            "transformer_engine",
            "fp8_rowwise",
            machine((9, 0)),
            "transformer_engine has no fp8_rowwise",
        ),
        (
            "transformer_engine",
            "fp8_current",
            machine((9, 0), te_version="2.8.0"),
            "fp8_current needs Transformer Engine 2.11; this is 2.8.0; use precision.",
        ),
        (
            "transformer_engine",
            "fp8_current",
            machine((9, 0), te_version=None, import_error="Transformer Engine does not import (x)"),
            "Transformer Engine does not import (x); use precision.backend=emulated",
        ),
        (
            "transformer_engine",
            "fp8_block",
            machine((9, 0), refused={"fp8_block": "CUDA is too old."}),
            "Transformer Engine refuses fp8_block here: CUDA is too old; here transformer_engine "
            "runs fp8_delayed, fp8_current; use",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_refusals(backend: str, recipe: str, here: Machine, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(precision(recipe, backend=backend), here)
    assert str(refused.value).startswith(f"precision.backend={backend}: ")
    assert reason in str(refused.value)
    # One layer in the recipe is enough.
    layers = [LayerRecipeConfig("*.down_proj", recipe), LayerRecipeConfig("*.up_proj", "bf16")]
    with pytest.raises(ConfigError, match=r"precision\.backend"):
        choose(precision("fp8_current", backend=backend, layer_recipes=layers), here)


def test_what_is_not_quantised_runs_on_any_backend() -> None:
    for recipe, backend in itertools.product(("bf16", "fp32"), BACKENDS):
        assert choose(precision(recipe, backend=backend), machine((8, 0))) == "torch"
    with pytest.raises(ConfigError, match="transformer_engine needs a CUDA GPU and this run is on"):
        choose(precision("bf16", backend="transformer_engine"), machine(None))


def down_proj(recipe: str) -> dict[str, Any]:
    return {"layer_recipes": [LayerRecipeConfig("*.down_proj", recipe)]}


LACKING = [  # backend, recipe, compute capability, options, how the refusal begins
    ("torch", "fp8_current", None, {"accumulate": "hopper"}, "precision.accumulate=hopper is for"),
    ("torch", "fp8_current", None, {"emulation": "exact"}, "precision.emulation=exact is for the"),
    (
        "torch",
        "fp8_current",
        None,
        {"formats": {"weight": "e5m2"}},
        "precision.backend=torch has no kernel for two E5M2 operands, and dgrad of fp8_current is "
        "E5M2×E5M2: change precision.format",
    ),
    (
        "torch",
        "fp8_rowwise",
        None,
        {"formats": {"fprop": {"weight": "e5m2"}}},
        "precision.backend=torch takes E5M2 with one scale a row as the left operand only, and "
        "fprop of fp8_rowwise is E4M3×E5M2",
    ),
    (
        "torch",
        "fp8_current",
        None,
        {"formats": {"wgrad": {"input": "e4m3fnuz"}}},
        "precision.backend=torch has E4M3 and E5M2 only, and wgrad of fp8_current is E5M2×E4M3FNUZ",
    ),
    ("transformer_engine", "fp8_block", (9, 0), {"accumulate": "hopper"}, "precision.accumulate"),
    ("transformer_engine", "fp8_block", (9, 0), {"emulation": "exact"}, "precision.emulation"),
    ("transformer_engine", "fp8_block", (9, 0), {"margin": 1}, "precision.margin=1: "),
    (
        "transformer_engine",
        "fp8_delayed",
        (9, 0),
        {"power_of_two_scales": True},
        "precision.power_of_two_scales=true: Transformer Engine's fp8_delayed has FP32 scales",
    ),
    (
        "transformer_engine",
        "fp8_block",
        (10, 0),
        {"power_of_two_scales": False},
        "precision.power_of_two_scales=false: FP32 scales of fp8_block need compute capability "
        "9.x and this GPU is 10.0",
    ),
    (
        "transformer_engine",
        "fp8_block",
        (9, 0),
        down_proj("fp8_current"),
        "precision.layer_recipes: precision.backend=transformer_engine runs one recipe a model, "
        "not fp8_block, fp8_current; keep fp8_block and bf16",
    ),
    (
        "transformer_engine",
        "fp8_block",
        (9, 0),
        {"cache_weights": True},
        "precision.cache_weights=true: ",
    ),
    (
        "transformer_engine",
        "fp8_block",
        (9, 0),
        {"smooth_swiglu": True},
        "precision.smooth_swiglu=true: ",
    ),
    (
        "transformer_engine",
        "fp8_block",
        (9, 0),
        {"bf16_inputs": ["*.down_proj"]},
        "precision.bf16_inputs=[*.down_proj]: ",
    ),
    (
        "transformer_engine",
        "fp8_block",
        (9, 0),
        {"stochastic_rounding": ["grad_output"]},
        "precision.stochastic_rounding=['grad_output']: Transformer Engine rounds stochastically "
        "in nvfp4 and grad_output only, not so in fp8_block",
    ),
    (
        "transformer_engine",
        "nvfp4",
        (10, 0),
        {"stochastic_rounding": ["weight"]},
        "precision.stochastic_rounding=['weight']: ",
    ),
    (
        "transformer_engine",
        "fp8_current",
        (9, 0),
        {"formats": {"dgrad": {"weight": "e5m2"}}},
        "precision.formats: Transformer Engine has no E4M3/E4M3|E5M2/E5M2 for input/weight/"
        "grad_output of fp8_current, only E4M3/E4M3/E5M2, E4M3/E4M3/E4M3; leave it out",
    ),
    (
        "transformer_engine",
        "nvfp4",
        (10, 0),
        {"formats": {"wgrad": {"input": "bf16"}}},
        "precision.formats: Transformer Engine has no E2M1|BF16/E2M1/E2M1",
    ),
]


@pytest.mark.parametrize(("backend", "recipe", "capability", "options", "begins"), LACKING)
def test_options_that_a_backend_lacks(
    backend: str,
    recipe: str,
    capability: tuple[int, int] | None,
    options: dict[str, Any],
    begins: str,
) -> None:
    config = with_options(precision(recipe, backend=backend), options)
    with pytest.raises(ConfigError) as refused:
        choose(config, machine(capability))
    line = str(refused.value)
    assert line.startswith(begins)
    assert "precision.backend=emulated" in line
    assert "\n" not in line
    config.backend = "emulated"
    assert choose(config, machine(capability)) == "emulated"


def with_options(config: PrecisionConfig, options: dict[str, Any], into: Any = None) -> Any:
    """Nested options set on a configuration."""
    place = config if into is None else into
    for key, value in options.items():
        if isinstance(value, dict):
            with_options(config, value, getattr(place, key))
        else:
            setattr(place, key, value)
    return config


@pytest.mark.parametrize(
    ("backend", "recipe", "options"),
    [
        ("transformer_engine", "nvfp4", {"hadamard": False, "stochastic_rounding": []}),
        ("transformer_engine", "fp8_block", {"power_of_two_scales": False, "format": "hybrid"}),
        ("transformer_engine", "fp8_block", down_proj("bf16")),
        ("transformer_engine", "fp8_delayed", {"margin": 2}),
        ("torch", "nvfp4", {"hadamard": False, "margin": 1, "stochastic_rounding": ["input"]}),
        ("torch", "fp8_current", down_proj("fp8_rowwise")),
        ("torch", "fp8_current", {"formats": {"dgrad": {"weight": "bf16"}}}),
    ],
)
def test_options_that_a_backend_has(backend: str, recipe: str, options: dict[str, Any]) -> None:
    here = machine((10, 0) if recipe == "nvfp4" else (9, 0))
    assert choose(with_options(precision(recipe, backend=backend), options), here) == backend


def test_this_machine() -> None:
    here = Machine.here(CPU, with_transformer_engine=True)
    assert (here.device, here.capability, here.te_version) == ("cpu", None, None)
    assert here.torch_version == torch.__version__
    for recipe in ON_CPU:
        assert choose_backend(precision(recipe, backend="torch"), CPU) == "torch"
    with pytest.raises(ConfigError, match="mxfp8 needs a CUDA GPU; this is a CPU"):
        choose_backend(precision("mxfp8", backend="torch"), CPU)
    with pytest.raises(ValueError, match="no backend is called triton"):
        load_backend("triton", precision("fp8_current"), CPU)


# --- the torch backend on a CPU ------------------------------------------------------------------


def train(config: PrecisionConfig, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """Three steps of a layer whose sizes are no multiples of 16: its payloads and scales, and its
    outputs and gradients."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(56, 40, bias=False)}).bfloat16()
    conversion = convert(model, config, CPU, backend=backend)
    layer: Any = model["up"]
    assert conversion.table[0][-1] == backend
    quantized: list[Tensor] = []

    def observe(role: str, x: Tensor, operand: Operand) -> None:
        if isinstance(operand, QuantizedTensor):
            if backend == "torch":
                assert operand.payload.dtype == operand.fmt.dtype
            quantized.extend((operand.grid_values(), operand.scale_inv))

    layer.numerics.observer = observe
    seen: list[Tensor] = []
    for step in range(3):
        conversion.begin_micro_batch(step, step)
        x = (torch.randn(33, 56) * 10.0**step).bfloat16().requires_grad_()
        y = layer(x)
        y.backward((torch.randn(33, 40) / 100).bfloat16())
        seen += [y.detach(), x.grad, layer.weight.grad]  # type: ignore[list-item]
        layer.weight.grad = None
        conversion.end_step()
    return quantized, seen


OPTIONS: list[dict[str, Any]] = [
    {},
    {"format": "e4m3", "power_of_two_scales": True},
    {"format": "hybrid", "power_of_two_scales": False},
    {"stochastic_rounding": ["grad_output", "weight"], "margin": 1},
    {"bf16_inputs": ["up"], "cache_weights": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("recipe", ON_CPU)
def test_as_the_emulated_backend(recipe: str, options: dict[str, Any]) -> None:
    """Payloads and scales bit for bit; sums in another order, so one BF16 rounding apart."""
    config = precision(recipe, **options)
    quantized, seen = train(config, "torch")
    expected_quantized, expected = train(config, "emulated")
    assert len(quantized) == len(expected_quantized) > 0
    for ours, theirs in zip(quantized, expected_quantized, strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    for ours, theirs in zip(seen, expected, strict=True):
        assert theirs.abs().max() > 0
        ulp = 2.0**-7 * theirs.float().abs()  # at most; and sums that cancel
        assert ((ours.float() - theirs.float()).abs() <= ulp + 1e-6).all()
        assert (ours != theirs).float().mean() < 0.02


def test_recipes_side_by_side() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    config = precision("fp8_current", layer_recipes=[LayerRecipeConfig("b", "fp8_rowwise")])
    conversion: Conversion = convert(model, config, CPU, backend="torch")
    assert [row[2] for row in conversion.table] == ["fp8_current", "fp8_rowwise"]
    x = torch.randn(4, 32, requires_grad=True)
    model["b"](model["a"](x)).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_nothing_but_nan_comes_of_a_nan() -> None:
    model = nn.ModuleDict({"up": nn.Linear(32, 32, bias=False)})
    convert(model, precision("fp8_current"), CPU, backend="torch")
    x = torch.randn(4, 32)
    x[1, 3] = torch.nan
    assert model["up"](x).isnan().any(1).tolist() == [False, True, False, False]


# --- what a GPU's kernels would get --------------------------------------------------------------


def offset(row: int, column: int, columns: int) -> int:
    """Where cuBLAS looks for the scale of a row and a block of K: the documentation's "1D Block
    Scaling Factors Layout", which it describes by tiles of 128 rows of four."""
    tiles_across = -(-columns // 4)
    tile = (row // 128) * tiles_across + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


@given(st.integers(1, 300), st.integers(1, 13))
def test_swizzled_scales_are_where_cublas_looks(rows: int, columns: int) -> None:
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    flat = swizzle(scales)
    assert flat.numel() == -(-rows // 128) * 128 * -(-columns // 4) * 4
    places = torch.tensor([[offset(r, c, columns) for c in range(columns)] for r in range(rows)])
    assert torch.equal(flat[places], scales)
    flat[places.flatten()] = 0
    assert not flat.any()


def test_the_first_scales_of_a_tile() -> None:
    """Figures of the documentation's picture: rows 0, 32, 64, 96, then row 1."""
    scales = torch.arange(128, dtype=torch.uint8)[:, None] * torch.ones(1, 4, dtype=torch.uint8)
    assert swizzle(scales)[:20:4].tolist() == [0, 32, 64, 96, 1]


def decoded(side: Packed) -> Tensor:
    """FP32 [R, K] that the kernel's operand stands for, read by the kernel's own rules."""
    if side.values.dtype == torch.float4_e2m1fn_x2:
        raw = side.values.view(torch.uint8)
        nibbles = torch.stack((raw & 15, raw >> 4), -1).flatten(1).long()
        grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        values = torch.tensor([*grid, *(-x for x in grid)])[nibbles]
    else:
        values = side.values.float()
    rows, depth = values.shape
    first = side.scales[0]
    scale = torch.empty(rows, depth)
    for row, k in itertools.product(range(rows), range(0, depth, 16)):
        part = scale[row, k : k + 16]
        match side.kinds[0]:
            case "TensorWise":
                part[:] = first
            case "RowWise":
                part[:] = first[row, 0]
            case "BlockWise1x128":
                part[:] = first[row, k // 128]
            case "BlockWise128x128":
                part[:] = first[k // 128, row // 128]
            case "BlockWise1x32":
                exponent = first.view(torch.uint8)[offset(row, k // 32, depth // 32)]
                part[:] = torch.tensor(2.0).double() ** (exponent.double() - 127)
            case "BlockWise1x16":
                byte = first.view(torch.uint8)[offset(row, k // 16, depth // 16)]
                part[:] = byte.view(torch.float8_e4m3fn).float()
    for more, kind in zip(side.scales[1:], side.kinds[1:], strict=True):
        assert kind == "TensorWise"
        values = values * more
    return values * scale


def operands(recipe: Recipe, rows: int, k: int, n: int) -> dict[str, tuple[Any, Any]]:
    """The operands of a layer's three GEMMs, as the torch backend's quantisers give them."""
    payload = TorchGemms.on(CPU).payload
    shapes = {"input": (rows, k), "weight": (n, k), "grad_output": (rows, n)}
    copies = {}
    for role, shape in shapes.items():
        x = torch.randn(shape) * torch.logspace(-2, 2, shape[1])
        copies[role] = Scaled(recipe, role, payload)(
            x, rowwise=True, columnwise=True, training=True, position=Position()
        )
    return {
        kind: tuple(copies[role][copy == "columnwise"] for role, copy in pair)
        for kind, pair in OPERANDS.items()
    }


CASES = {
    "current": DEFAULTS["fp8_current"],
    "rowwise": DEFAULTS["fp8_rowwise"],
    "bf16_wgrad": DEFAULTS["fp8_rowwise_bf16_wgrad"],
    "block": DEFAULTS["fp8_block"],
    "block_fp32": BlockScaling(power_of_two=False),
    "mxfp8": DEFAULTS["mxfp8"],
    "nvfp4": DEFAULTS["nvfp4"],
}
SHAPES = [(32, 256, 160), (20, 648, 24), (130, 40, 24), (1, 16, 32)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_packed_operands_are_the_quantised_ones(case: str, shape: tuple[int, int, int]) -> None:
    """Read as a kernel reads them, they multiply to what the emulated backend gives."""
    torch.manual_seed(0)
    for kind, (a, b) in operands(CASES[case], *shape).items():
        if isinstance(a, Tensor):
            continue
        call = Call.of(kind, a, b, torch.float32)
        product = (decoded(call.left).double() @ decoded(call.right).double().t()).float()
        expected = Emulated(torch.float32, exact=True).gemm(kind, a, b, torch.float32)
        rows, columns = expected.shape
        assert (call.left.rows, call.right.rows) == (rows, columns)
        size = torch.linalg.vector_norm(expected)
        torch.testing.assert_close(product[:rows, :columns] / size, expected / size)
        assert not product[rows:].any()
        assert not product[:, columns:].any()
        assert call.fast == (kind == "fprop" and case in ("current", "rowwise", "bf16_wgrad"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_torch_takes_the_arguments(case: str, shape: tuple[int, int, int]) -> None:
    """torch's own rules for a GPU's operands (sizes, strides, types, scales), on tensors without
    data: nothing runs."""

    def on_gpu(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    for kind, (a, b) in operands(CASES[case], *shape).items():
        if isinstance(a, Tensor):
            continue
        call = Call.of(kind, a, b, torch.bfloat16)
        sides = call.left, call.right
        with FakeTensorMode():
            left, right = (
                Packed(on_gpu(s.values), [on_gpu(x) for x in s.scales], s.kinds, s.rows)
                for s in sides
            )
            y = Call(left, right, torch.bfloat16, call.fast).multiply()
            assert y.shape == (sides[0].values.shape[0], sides[1].values.shape[0])
            assert y.dtype == torch.bfloat16


def test_operands_in_high_precision() -> None:
    """A GEMM of BF16 and small blocks is one plain GEMM over the values they stand for."""
    torch.manual_seed(0)
    gemms = TorchGemms.on(CPU)
    for recipe in ("mxfp8", "nvfp4", "fp8_block"):
        a, b = operands(DEFAULTS[recipe], 32, 64, 48)["fprop"]
        x = torch.randn(32, 64).bfloat16()
        for left, right in ((x, b), (a, torch.randn(48, 64).bfloat16())):
            values = [o if isinstance(o, Tensor) else o.dequantize() for o in (left, right)]
            expected = values[0].double() @ values[1].double().t()
            y = gemms.gemm("fprop", left, right, torch.float32)
            torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)


def test_payloads_in_real_bytes() -> None:
    for case, recipe in CASES.items():
        a, b = operands(recipe, 32, 128, 48)["fprop"]
        stored = Call.of("fprop", a, b, torch.bfloat16).left.values.view(torch.uint8)
        assert stored.nbytes == 32 * 128 * a.fmt.bits // 8
        assert torch.equal(decode(stored, a.fmt), a.grid_values())
        if case != "nvfp4":
            assert a.payload.dtype == a.fmt.dtype


def test_every_recipe_of_the_table_has_formats_that_run() -> None:
    for name in (*ON_CPU, *ON_GPU):
        here = machine((9, 0) if name.startswith("fp8_") else (10, 0))
        assert choose(precision(name, backend="torch"), here) == "torch"
