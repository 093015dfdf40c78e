"""The CPU kernels against the plain torch forms and the eight-bit cast, bit for bit."""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fp8train.config import PrecisionConfig
from fp8train.precision.formats import BY_NAME, E2M1, E4M3, E5M2, Format, cast
from fp8train.precision.kernels import cpu_kernels
from fp8train.precision.nvfp4 import hadamard, quantize_nvfp4
from fp8train.precision.quantize import (
    Draw,
    Payload,
    apply_scales,
    block_amax,
    quantize,
    quantize_pair,
)
from fp8train.precision.quantizers import Position, Rounding, Scaled
from fp8train.precision.recipes import recipe_of
from fp8train.precision.scaling import ScaleRule, Scales, scale_from_amax
from fp8train.precision.tensor import COLUMN, ROW, TENSOR, Granularity, QuantizedTensor

DTYPES = (torch.float32, torch.bfloat16)
FORMATS = pytest.mark.parametrize("fmt", BY_NAME.values(), ids=BY_NAME)
BLOCKS = [Granularity(*block) for block in ((1, 128), (128, 1), (128, 128))]
GRANULARITIES = [
    *(TENSOR, ROW, COLUMN, *BLOCKS),
    *(Granularity(*block) for block in ((1, 32), (32, 1), (1, 16), (16, 1), (16, 16), (24, 40))),
]
PAIRS = [(ROW, COLUMN), (Granularity(1, 128), Granularity(128, 1)), (BLOCKS[2], BLOCKS[2])]
PAIRS += [(Granularity(1, size), Granularity(size, 1)) for size in (16, 32)]
PAIRS += [(ROW, TENSOR), (COLUMN, ROW), (COLUMN, COLUMN), (Granularity(1, 24), Granularity(32, 1))]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 3e38, 2.0**-126, 6.5e-37]
values = st.floats(width=32) | st.sampled_from(SPECIAL)
matrices = hnp.arrays(
    np.float32, st.tuples(*[st.integers(1, 150)] * 2), elements=values, fill=values
)
rules = st.builds(
    ScaleRule, st.sampled_from(["fp32", "power_of_two", "e8m0"]), st.sampled_from([0, 2, 32, -6])
)
payloads = st.builds(
    Payload, st.sampled_from(DTYPES), st.sampled_from(["never", "always", "exact"])
)
offsets = st.integers(0, 2**31)
sixty_four = st.integers(0, 2**64 - 1)
draws = st.builds(Draw, sixty_four, sixty_four, offsets, offsets)


def plain(function, *args, **kwargs):
    """The result without the compiled kernels."""
    with mock.patch.object(cpu_kernels, "library", return_value=None):
        return function(*args, **kwargs)


def bits(x: Tensor) -> Tensor:
    """Bit patterns, all NaNs alike."""
    x = torch.where(x.isnan(), torch.nan, x.float())
    return x.view(torch.int32)


def same(ours: QuantizedTensor, other: QuantizedTensor) -> None:
    assert (ours.fmt, ours.granularity, ours.folded) == (other.fmt, other.granularity, other.folded)
    assert (ours.payload.dtype, ours.payload.shape) == (other.payload.dtype, other.payload.shape)
    assert torch.equal(bits(ours.scale_inv), bits(other.scale_inv))
    assert torch.equal(bits(ours.payload), bits(other.payload))
    if ours.tensor_scale_inv is None or other.tensor_scale_inv is None:
        assert ours.tensor_scale_inv is other.tensor_scale_inv
    else:
        assert torch.equal(bits(ours.tensor_scale_inv), bits(other.tensor_scale_inv))


def mixed(rows: int, columns: int, seed: int = 0) -> Tensor:
    """FP32 values over the whole range, with a few special ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = torch.ldexp(x, torch.randint(-140, 126, (1, columns), generator=generator))
    where = torch.randint(0, 400, x.shape, generator=generator)
    for index, value in enumerate(SPECIAL):
        x = torch.where(where == index, value, x)
    return x


def test_kernels_are_built() -> None:
    assert cpu_kernels.library() is not None, "this machine has a compiler: the kernels must build"


def test_without_a_compiler_plain_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert cpu_kernels.library.__wrapped__() is None


@FORMATS
@settings(deadline=None, max_examples=50)
@given(
    x=matrices,
    dtype=st.sampled_from(DTYPES),
    granularity=st.sampled_from(GRANULARITIES),
    rule=rules,
    payload=payloads,
    draw=st.none() | draws,
)
def test_quantize(
    fmt: Format,
    x: np.ndarray,
    dtype: torch.dtype,
    granularity: Granularity,
    rule: ScaleRule,
    payload: Payload,
    draw: Draw | None,
) -> None:
    args = (torch.from_numpy(x).to(dtype), fmt, granularity, rule, payload)
    same(quantize(*args, draw=draw), plain(quantize, *args, draw=draw))


@settings(deadline=None, max_examples=100)
@given(
    x=matrices,
    dtype=st.sampled_from(DTYPES),
    fmt=st.sampled_from(list(BY_NAME.values())),
    pair=st.sampled_from(PAIRS),
    rule=rules,
    payload=payloads,
)
def test_pair(
    x: np.ndarray,
    dtype: torch.dtype,
    fmt: Format,
    pair: tuple[Granularity, Granularity],
    rule: ScaleRule,
    payload: Payload,
) -> None:
    tensor = torch.from_numpy(x).to(dtype)
    copies = quantize_pair(tensor, fmt, pair, rule, payload)
    for copy, granularity in zip(copies, pair, strict=True):
        same(copy, plain(quantize, tensor, fmt, granularity, rule, payload))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}, {pair[1]}")
@pytest.mark.parametrize("kind", ["fp32", "e8m0"])
def test_pair_of_many_tiles(
    pair: tuple[Granularity, Granularity], dtype: torch.dtype, kind: str
) -> None:
    """Several strips, tiles and threads, more rows than a tile has, ragged edges."""
    x, rule, payload = mixed(700, 1500).to(dtype), ScaleRule(kind), Payload(dtype, "always")
    for copy, granularity in zip(quantize_pair(x, E4M3, pair, rule, payload), pair, strict=True):
        same(copy, plain(quantize, x, E4M3, granularity, rule, payload))


@settings(deadline=None, max_examples=100)
@given(
    x=matrices,
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([(1, 16), (16, 1), (16, 16)]),
    payload=payloads,
    margin=st.sampled_from([0, 3]),
    draw=st.none() | draws,
    transformed=st.booleans(),
)
def test_nvfp4(
    x: np.ndarray,
    dtype: torch.dtype,
    block: tuple[int, int],
    payload: Payload,
    margin: int,
    draw: Draw | None,
    transformed: bool,
) -> None:
    tensor = torch.from_numpy(x).to(dtype)
    if transformed:
        tensor = hadamard(tensor)
        assert torch.equal(bits(tensor), bits(plain(hadamard, torch.from_numpy(x).to(dtype))))
    args, options = (tensor, Granularity(*block), payload), {"margin": margin, "draw": draw}
    same(quantize_nvfp4(*args, **options), plain(quantize_nvfp4, *args, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [None, torch.randint(2**33, (75,))], ids=["in order", "numbered"])
def test_large_matrices(dtype: torch.dtype, rows: Tensor | None) -> None:
    """Wide enough for several spans of a row and for threads."""
    x, payload = mixed(75, 2500).to(dtype), Payload(dtype, "always")
    draw = Draw(2**63 + 5, 2**40 + 1, 7, 9, rows)
    for granularity in GRANULARITIES:
        args = (x, E5M2, granularity, ScaleRule("power_of_two"), payload)
        same(quantize(*args, draw=draw), plain(quantize, *args, draw=draw))
    for granularity in (Granularity(1, 16), Granularity(16, 1), Granularity(16, 16)):
        args = (x.nan_to_num(posinf=1, neginf=1), granularity, payload)
        same(quantize_nvfp4(*args, draw=draw), plain(quantize_nvfp4, *args, draw=draw))
    assert torch.equal(bits(hadamard(x)), bits(plain(hadamard, x)))


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=25)
@given(x=matrices, scale=st.sampled_from([1.0, 0.37, 448.0, 2.0**-100, 3e38]))
def test_one_given_scale(fmt: Format, dtype: torch.dtype, x: np.ndarray, scale: float) -> None:
    tensor, factor = torch.from_numpy(x).to(dtype), torch.tensor(scale).view(1, 1)
    scales = Scales(factor, factor.reciprocal())
    for payload in map(Payload, DTYPES):
        ours = apply_scales(tensor, scales, fmt, TENSOR, payload)
        same(ours, plain(apply_scales, tensor, scales, fmt, TENSOR, payload))
        if fmt.dtype is not None:
            reference = cast(tensor.float() * factor, fmt).to(payload.dtype)
            assert torch.equal(bits(ours.payload), bits(reference))
    assert torch.equal(block_amax(tensor, TENSOR), plain(block_amax, tensor, TENSOR))


@settings(deadline=None, max_examples=50)
@given(
    x=matrices,
    granularity=st.sampled_from(GRANULARITIES),
    fold=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    draw=st.none() | draws,
    seed=st.integers(0, 99),
)
def test_given_block_scales(
    x: np.ndarray,
    granularity: Granularity,
    fold: bool,
    dtype: torch.dtype,
    draw: Draw | None,
    seed: int,
) -> None:
    """Any scales, also such that a product with scale_inv must be rounded."""
    tensor = torch.from_numpy(x)
    grid = granularity.grid(*x.shape)
    scale = mixed(*grid, seed).abs().nan_to_num(1, 1)
    args = (tensor, Scales(scale, scale.reciprocal()), E4M3, granularity, Payload(dtype))
    options = {"fold": fold, "draw": draw}
    same(apply_scales(*args, **options), plain(apply_scales, *args, **options))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_folded_values_that_bf16_must_round(fmt: Format) -> None:
    """Values below 2^-126 with a scale_inv of 2^-127 have bits that BF16 lacks."""
    x = torch.arange(1, 1 + 64 * 64).view(64, 64) * 2.0**-139
    args = (x, fmt, Granularity(1, 32), ScaleRule("e8m0"), Payload(torch.bfloat16, "always"))
    exact = plain(quantize, *args[:4], Payload(torch.float32, "always"))
    assert not torch.equal(exact.payload, exact.payload.bfloat16().float())
    same(quantize(*args), plain(quantize, *args))


def test_stochastic_threshold_is_exact() -> None:
    """2·noise + 1 2^-25ths of a quantum go down, the next number above them up."""
    draw, one = Draw(11, 3, 5, 6), torch.ones(1, 1)
    noise = draw.noise(torch.empty(64, 64))
    edge = (2 * noise + 1).float() * (2.0**-25 * E4M3.smallest)
    above = edge.nextafter(torch.tensor(1.0))
    exact = noise < 2**23  # 2·noise + 1 has 24 bits
    for how in (apply_scales, lambda *args, **options: plain(apply_scales, *args, **options)):
        down, up = (
            how(x, Scales(one, one), E4M3, TENSOR, Payload(torch.float32), draw=draw).payload[exact]
            for x in (edge, above)
        )
        assert (down == 0).all() and (up == E4M3.smallest).all()


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_rowwise_bf16_wgrad", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_two_operands_are_those_asked_for_singly(recipe: str, role: str) -> None:
    what = recipe_of(PrecisionConfig(recipe=recipe))
    quantizer = Scaled(what, role, Payload(torch.float32, "always"))
    x, rest = mixed(200, 300), {"training": True, "position": Position()}
    both = quantizer(x, rowwise=True, columnwise=True, **rest)
    single = (
        quantizer(x, rowwise=True, columnwise=False, **rest)[0],
        quantizer(x, rowwise=False, columnwise=True, **rest)[1],
    )
    for ours, expected in zip(both, single, strict=True):
        if isinstance(expected, Tensor):
            assert ours is expected is x
        else:
            same(ours, expected)


def test_stochastic_operands_draw_apart() -> None:
    """Both copies together are not one pass: each has bits of its own."""
    precision = PrecisionConfig(recipe="fp8_block", stochastic_rounding=["input"])
    rounding = Rounding(True, "layer", "input", 1)
    quantizer = Scaled(recipe_of(precision), "input", Payload(torch.float32), rounding)
    x = torch.full((128, 128), 1.03)
    rowwise, columnwise = quantizer(
        x, rowwise=True, columnwise=True, training=True, position=Position()
    )
    assert not torch.equal(rowwise.payload, columnwise.payload)


def test_row_numbers_are_of_these_rows() -> None:
    x, one = torch.ones(4, 4), torch.ones(1, 1)
    args = (x, Scales(one, one), E4M3, TENSOR, Payload(torch.float32))
    for function in (apply_scales, lambda *args, **options: plain(apply_scales, *args, **options)):
        with pytest.raises(ValueError, match="the numbers of 3 rows and is given 4"):
            function(*args, draw=Draw(1, 1, rows=torch.arange(3)))


def test_rows_behind_the_last_are_numbered_on() -> None:
    """The Hadamard transform makes up 37 rows to 48, and those draw too."""
    recipe, rounding = recipe_of(PrecisionConfig("nvfp4")), Rounding(True, "layer", "grad_output")
    quantizer = Scaled(recipe, "grad_output", Payload(torch.float32), rounding)
    x, asked = torch.randn(37, 16), {"rowwise": True, "columnwise": True, "training": True}
    numbered = Position(rows=torch.arange(37).view(1, 37))
    for ours, expected in zip(
        quantizer(x, **asked, position=numbered),
        quantizer(x, **asked, position=Position()),
        strict=True,
    ):
        same(ours, expected)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_blocks_by_hand(fmt: Format) -> None:
    """A loop over blocks with the eight-bit cast: slow, plain, and sharing no code."""
    x = torch.randn(200, 300) * torch.logspace(-6, 6, 300)
    for granularity in BLOCKS:
        rows, columns = granularity.block(*x.shape)
        ours = quantize(x, fmt, granularity, ScaleRule("power_of_two"), Payload(torch.float32))
        for i, j in itertools.product(range(0, 200, rows), range(0, 300, columns)):
            tile = x[i : i + rows, j : j + columns]
            scale = scale_from_amax(tile.abs().max(), fmt.max, power_of_two=True)
            expected = cast(tile * scale, fmt).float()
            assert torch.equal(ours.payload[i : i + rows, j : j + columns], expected)
            assert ours.scale_inv[i // rows, j // columns] == 1 / scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_folded_payload_is_exact(dtype: torch.dtype) -> None:
    x, rule = torch.randn(256, 256).bfloat16(), ScaleRule("power_of_two")
    for granularity in BLOCKS:
        apart = quantize(x, E4M3, granularity, rule, Payload(dtype))
        folded = quantize(x, E4M3, granularity, rule, Payload(dtype, "always"))
        assert torch.equal(apart.dequantize(), folded.payload.float())


@pytest.mark.parametrize("shape", [(0, 128), (4, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    x, rule, payload = torch.empty(shape), ScaleRule("power_of_two"), Payload(torch.float32)
    for granularity in GRANULARITIES:
        args = (x, E4M3, granularity, rule, payload)
        same(quantize(*args), plain(quantize, *args))
    for pair in PAIRS:
        for copy, expected in zip(
            quantize_pair(x, E4M3, pair, rule, payload),
            plain(quantize_pair, x, E4M3, pair, rule, payload),
            strict=True,
        ):
            same(copy, expected)
    assert torch.equal(hadamard(x), plain(hadamard, x))


def test_tensors_without_memory_of_their_own_are_left_to_torch() -> None:
    class Wrapped(torch.Tensor):
        pass

    ones = torch.ones(3, 4)
    assert cpu_kernels.usable(ones)
    assert cpu_kernels.usable(torch.nn.Parameter(ones))
    assert not cpu_kernels.usable(ones.as_subclass(Wrapped))
    assert not cpu_kernels.usable(ones[:, :2])
    assert not cpu_kernels.usable(ones.half())


def test_non_contiguous_tensors() -> None:
    x, rule, payload = torch.randn(130, 70).bfloat16(), ScaleRule("fp32"), Payload(torch.float32)
    for view in (x.t(), x[::2], x[:, 3:]):
        for granularity in GRANULARITIES:
            same(
                quantize(view, E4M3, granularity, rule, payload),
                quantize(view.contiguous(), E4M3, granularity, rule, payload),
            )


def snr(x: Tensor, quantized: Tensor) -> float:
    return 10 * math.log10(float(x.square().sum() / (x - quantized).square().sum()))


@pytest.mark.parametrize(
    "name, per_tensor, vector, square, mx",  # dB for E4M3 and E5M2, FP32 scales but for MX
    [
        ("gaussian", (31.5, 25.6), (31.8, 25.8), (31.6, 25.6), (31.5, 25.5)),
        ("student", (31.6, 25.6), (33.1, 27.1), (31.8, 25.8), (31.4, 25.5)),
        ("channels", (31.5, 25.6), (42.0, 36.0), (31.8, 25.6), (31.6, 25.4)),
        ("rows", (31.6, 25.6), (31.8, 25.8), (31.6, 25.6), (31.6, 25.6)),
    ],
)
def test_signal_to_noise(name: str, per_tensor, vector, square, mx) -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 4096)
    if name == "student":
        x = torch.distributions.StudentT(3.0).sample((1024, 4096))
    if name == "channels":
        x[:, ::1024] *= 100
    if name == "rows":
        x *= 2.0 ** -(torch.arange(1024) % 21)[:, None]
    fp32, power_of_two, e8m0 = (ScaleRule(kind) for kind in ("fp32", "power_of_two", "e8m0"))
    for index, fmt in enumerate((E4M3, E5M2)):

        def got(granularity: Granularity, rule: ScaleRule, fmt: Format = fmt) -> Tensor:
            return quantize(x, fmt, granularity, rule, Payload(torch.float32)).dequantize()

        whole = got(TENSOR, fp32)
        assert snr(x, whole) == pytest.approx(per_tensor[index], abs=0.3)
        if name == "rows" and fmt is E4M3:
            assert (whole == 0).float().mean().item() == pytest.approx(0.225, abs=0.005)
        for block, expected in ((BLOCKS[0], vector), (BLOCKS[2], square)):
            assert snr(x, got(block, fp32)) == pytest.approx(expected[index], abs=0.3)
            assert snr(x, got(block, power_of_two)) == pytest.approx((31.5, 25.5)[index], abs=0.3)
        assert snr(x, got(Granularity(1, 32), e8m0)) == pytest.approx(mx[index], abs=0.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_s_scale_overflows_to_the_input_s_type(dtype: torch.dtype) -> None:
    x = torch.full((1, 128), 1e-37, dtype=dtype)
    payload = Payload(torch.float32)
    for granularity, scale in (
        (Granularity(1, 128), torch.finfo(dtype).max),
        (ROW, torch.finfo(torch.float32).max),
    ):
        made = quantize(x, E4M3, granularity, ScaleRule("fp32"), payload)
        assert made.scale_inv.item() == (1 / torch.tensor(scale)).item()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
def test_an_exact_fold_keeps_every_product_in_range(fmt: Format) -> None:
    """Where the least and the largest values of two operands fold, their products are exact."""
    rule, payload = ScaleRule("power_of_two"), Payload(torch.float32, "exact")
    folded = []
    for exponent in range(-126, 127):
        x = torch.full((1, 128), fmt.max) * 2.0**exponent
        x[0, 1:] = fmt.smallest * 2.0**exponent
        if not x.isfinite().all():
            continue
        made = quantize(x, fmt, Granularity(1, 128), rule, payload)
        if made.folded:
            folded.append(exponent)
            values = made.payload
            for product in (values[0, 0] * values[0, 0] * 1024, values[0, 1] * values[0, 1]):
                assert 2.0**-126 <= product.item() < float("inf")
    assert folded == list(range(folded[0], folded[-1] + 1))
    assert folded[0] < -30 and folded[-1] > 30  # ordinary tensors fold
