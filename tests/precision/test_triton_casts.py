"""The Triton kernels against the plain torch definition, bit for bit, and their machine code.

The comparisons run in a process of their own: on a CPU in Triton's interpreter, which must be
chosen before Triton is imported; where there is a GPU, on that too. The interpreter's casts to
eight bits are wrong, so there the values come in BF16 and FP32, and the instruction that makes
eight bits of them is looked for in the code compiled for Hopper and Blackwell.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fp8train.precision import scaling
from fp8train.precision.formats import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    Format,
    round_to_grid,
)
from fp8train.precision.formats import cast as plain_cast
from fp8train.precision.kernels import triton_casts, triton_wire
from fp8train.precision.kernels.triton_casts import Copy, Launch, Quantized, Target
from fp8train.precision.quantize import tiles
from fp8train.precision.scaling import FLT_MAX, ScaleRule, Scales
from fp8train.precision.tensor import COLUMN, ROW, TENSOR, Granularity, spread
from fp8train.precision.wire import EightBit

BF16, FP32 = torch.bfloat16, torch.float32
BF16_MAX = torch.finfo(BF16).max
BLOCKS = [Granularity(*size) for size in ((1, 128), (128, 1), (128, 128), (1, 32), (32, 1))]
GRANULARITIES = [TENSOR, ROW, COLUMN, *BLOCKS]
RULES = [
    *(ScaleRule(kind) for kind in ("fp32", "power_of_two", "e8m0")),
    *(ScaleRule("fp32", 2), ScaleRule("power_of_two", -3), ScaleRule("e8m0", 1)),
]
DEVICE = torch.device(sys.argv[1] if __name__ == "__main__" else "cpu")

values = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40])
matrices = hnp.arrays(
    np.float32, st.tuples(*[st.integers(1, 150)] * 2), elements=values, fill=values
)
few = settings(deadline=None, max_examples=40, derandomize=True, database=None)

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Have `test_bits` run it in a process with the kernels."""
    CHECKS[function.__name__] = function
    return function


def placed(x: Tensor) -> Tensor:
    """x where the kernels run, in the midst of numbers that no kernel should read."""
    around = torch.full((x.numel() + 2**15,), 2e38, dtype=x.dtype, device=DEVICE)
    inside = around[2**14 : 2**14 + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


def bits(x: Tensor) -> Tensor:
    """Bit patterns, all NaNs alike."""
    x = x.cpu().float()
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(torch.int32)


def same(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape
    wrong = bits(ours) != bits(expected)
    assert not wrong.any(), (wrong.nonzero()[0].tolist(), ours[wrong][0], expected[wrong][0])


def plain_amax(x: Tensor, granularity: Granularity) -> Tensor:
    return scaling.amax(tiles(x, granularity), dim=(1, 3))


def plain_values(
    x: Tensor, fmt: Format, granularity: Granularity, scales: Scales, *, fold: bool
) -> Tensor:
    made = round_to_grid(x.float() * spread(scales.scale, granularity, *x.shape), fmt)
    return made * spread(scales.scale_inv, granularity, *x.shape) if fold else made


def dtypes(fmt: Format) -> list[torch.dtype]:
    """The dtypes of values that can be held to plain torch on this device."""
    if DEVICE.type == "cpu" or fmt.dtype is None or torch.cuda.get_device_capability() < (8, 9):
        return [BF16, FP32]
    return [BF16, FP32, fmt.dtype]


def compare(
    x: Tensor,
    fmt: Format,
    copies: list[Copy],
    rule: ScaleRule,
    dtype: torch.dtype,
    *,
    overflow: float = FLT_MAX,
    fold: bool = False,
) -> list[Quantized]:
    made = triton_casts.quantize(placed(x), fmt, copies, rule, dtype, overflow=overflow, fold=fold)
    for copy, (ours, scale_inv) in zip(copies, made, strict=True):
        amax = plain_amax(x, copy.granularity)
        scales = rule.scales(amax, fmt.max, overflow)
        same(scale_inv, scales.scale_inv)
        assert ours.dtype == dtype
        assert (ours.t() if copy.transposed else ours).is_contiguous()
        same(ours, plain_values(x, fmt, copy.granularity, scales, fold=fold).to(dtype))
    return made


@check
def any_matrix() -> None:
    @few
    @given(
        *(matrices, st.sampled_from([BF16, FP32]), st.sampled_from([E4M3, E5M2, E2M1])),
        *(st.sampled_from(RULES), st.lists(st.sampled_from(GRANULARITIES), min_size=1, max_size=2)),
        *(st.booleans(), st.sampled_from([FLT_MAX, BF16_MAX]), st.data()),
    )
    def compared(
        x: np.ndarray[Any, Any],
        dtype: torch.dtype,
        fmt: Format,
        rule: ScaleRule,
        granularities: list[Granularity],
        transposed: bool,
        overflow: float,
        data: st.DataObject,
    ) -> None:
        copies = [Copy(each, transposed ^ bool(i)) for i, each in enumerate(granularities)]
        made_of = data.draw(st.sampled_from(dtypes(fmt)))
        compare(torch.from_numpy(x).to(dtype), fmt, copies, rule, made_of, overflow=overflow)

    compared()


@check
def every_recipe() -> None:
    """A matrix of several tiles with ragged edges, in each granularity, as a pair."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(131, 1, generator=generator).mul(12).exp2()
    x = (torch.randn(131, 70, generator=generator) * sizes).bfloat16()
    for each in GRANULARITIES:
        across = Granularity(each.columns, each.rows)
        for rule, dtype in zip(RULES[:3], dtypes(E4M3) * 2, strict=False):
            compare(x, E4M3, [Copy(each), Copy(across, True)], rule, dtype)


@check
def folded_values() -> None:
    """With power-of-two scales the values may be multiplied back; odd scales test the order."""
    x = torch.randn(50, 130, generator=torch.Generator().manual_seed(1))
    for rule in RULES:
        for each in (Granularity(128, 1), Granularity(1, 32), ROW):
            compare(x, E5M2, [Copy(each), Copy(each, True)], rule, FP32, fold=True)
    compare(x, E4M3, [Copy(BLOCKS[3])], ScaleRule("e8m0"), BF16, fold=True)


@check
def scales_of_special_amaxes() -> None:
    """A column of amaxes, one a row, to the last bit of each rule."""
    special = [0.0, math.inf, math.nan, FLT_MAX, BF16_MAX, 1e-37, 6.58e-37, 1e-45, 0.1, 3.0]
    special += [0.875, 1.0, 1.75, 3.5, 447.9, 448.0, 448.1, 480.0, 57344.0, 57345.0]
    special += [2.0**-127, 2.0**-126, 448 * 2.0**-126, 448 * 2.0**-127, 449 * 2.0**-127]
    special += [672 * 2.0**-128, 2.0**-149, 2.0**127]
    x = torch.tensor(special)[:, None].repeat(1, 3)
    x[:, 1] = -x[:, 1] / 2
    x[:, 2] = math.nan
    for fmt in (E4M3, E5M2):
        for rule in (*RULES, ScaleRule("power_of_two", 127), ScaleRule("fp32", -100)):
            for overflow in (FLT_MAX, BF16_MAX):
                for each in (ROW, Granularity(1, 128), Granularity(1, 32)):
                    compare(x, fmt, [Copy(each)], rule, FP32, overflow=overflow)


@check
def scales_of_random_amaxes() -> None:
    """Division and reciprocal are IEEE's: a last bit would show in some of 32,768."""
    drawn = torch.randint(0, 0x7F800000, (128, 256), generator=torch.Generator().manual_seed(2))
    x = drawn.int().view(FP32)
    for rule in RULES:
        compare(x, E4M3, [Copy(Granularity(1, 1))], rule, FP32)


@check
def every_bf16_value() -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16).view(2**8, 2**8)
    one = torch.ones(1, 1, device=DEVICE)
    for fmt in (E4M3, E5M2):
        for dtype in dtypes(fmt):
            copies = [Copy(TENSOR), Copy(TENSOR, True)]
            made = triton_casts.cast(placed(x), fmt, copies, [Scales(one, one)] * 2, dtype)
            for each in made:
                same(each, plain_cast(x, fmt))
                signs = torch.signbit(each.cpu().float()) == torch.signbit(x.float())
                assert (signs | x.isnan()).all()


@check
def given_scales() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(140, 70, generator=generator) * 100
    for each in GRANULARITIES:
        scale = torch.rand(each.grid(*x.shape), generator=generator) * 9 + 0.1
        scales = Scales(scale, scale.reciprocal())
        there = Scales(*(part.to(DEVICE) for part in scales))
        copies = [Copy(each), Copy(each, True)]
        for fold in (False, True):
            made = triton_casts.cast(placed(x), E4M3, copies, [there] * 2, FP32, fold=fold)
            for ours in made:
                same(ours, plain_values(x, E4M3, each, scales, fold=fold))


@check
def amaxes() -> None:
    generator = torch.Generator().manual_seed(4)
    for rows, columns in ((150, 70), (64, 64), (1, 1), (257, 3)):
        x = torch.randn(rows, columns, generator=generator)
        x.view(-1)[::7] = math.nan
        for dtype in (BF16, FP32):
            for each in (*GRANULARITIES, Granularity(16, 16)):
                same(triton_casts.amax(placed(x.to(dtype)), each), plain_amax(x.to(dtype), each))
            pair = triton_casts.amaxes(placed(x.to(dtype)), [ROW, COLUMN])
            for ours, each in zip(pair, (ROW, COLUMN), strict=True):
                same(ours, plain_amax(x.to(dtype), each))
    x[1, 1] = -math.inf
    assert triton_casts.amax(placed(x), TENSOR).item() == math.inf
    nothing = torch.full((3, 5), math.nan)
    assert triton_casts.amax(placed(nothing), TENSOR).item() == 0


@check
def messages() -> None:
    """Bytes of a gradient for the wire: ragged, of values of every size and none."""
    generator = torch.Generator().manual_seed(5)
    for fmt in (E5M2, E4M3):
        wire = EightBit(fmt.name.lower(), fmt)
        for rows, size in ((3, 1), (2, 127), (1, 128), (2, 5000)):
            x = torch.randn(rows, size, generator=generator)
            x *= (20 * torch.randn(rows, size, generator=generator)).exp2()
            x[0, ::7], x[-1, 3::11] = 0.0, -0.0
            same_bytes(x, wire)
        drawn = torch.randint(0, 2**32, (2, 128 * 40), generator=generator)
        same_bytes(drawn.to(torch.uint32).view(FP32), wire)  # with NaN and Inf here and there
        grid = torch.arange(2**16).to(torch.uint16).view(torch.int16).view(BF16).float()
        blocks = grid[grid.isfinite()].view(-1, 120)  # 544 of them
        for largest in (fmt.max, FLT_MAX, 2.0**-120):
            last = torch.full((len(blocks), 8), largest)
            x = torch.cat((blocks.clamp(-largest, largest), last), dim=1)
            same_bytes(x.view(1, -1), wire)


def same_bytes(x: Tensor, wire: EightBit) -> None:
    ours = triton_wire.encode(placed(x), wire.width(x.shape[1]), wire.fmt).cpu()
    expected = wire.encode_plainly(x)
    wrong = ours != expected
    assert not wrong.any(), (wrong.nonzero()[0].tolist(), ours[wrong][0], expected[wrong][0])


@check
def sums_of_messages() -> None:
    generator = torch.Generator().manual_seed(6)
    for fmt in (E5M2, E4M3):
        wire = EightBit(fmt.name.lower(), fmt)
        for count, size in ((1, 1), (2, 130), (5, 3000)):
            drawn = torch.randint(0, 256, (count, wire.width(size)), generator=generator)
            noise = drawn.to(torch.uint8)  # every byte there is, as payload and as scale
            x = torch.randn(count, size, generator=generator)
            for sent in (noise, wire.encode_plainly(x)):
                total = torch.linspace(-1, 1, size)
                expected = total.clone()
                for message in sent:
                    expected += wire.decode_plainly(message, size)
                ours = placed(total)
                triton_wire.add(ours, sent.to(DEVICE), fmt)
                same(ours, expected)


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(scope="module")
def outcomes() -> Callable[[str], dict[str, str | None]]:
    """Device → check → what went wrong, each device in one process."""
    known: dict[str, dict[str, str | None]] = {}

    def of(device: str) -> dict[str, str | None]:
        if device not in known:
            mode = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
            found = subprocess.run(
                [sys.executable, __file__, device],
                env={**os.environ, **mode, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                text=True,
            )
            assert found.returncode == 0, found.stderr
            known[device] = json.loads(found.stdout.splitlines()[-1])
        return known[device]

    return of


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("name", CHECKS)
def test_bits(outcomes: Callable[[str], dict[str, str | None]], device: str, name: str) -> None:
    wrong = outcomes(device)[name]
    assert wrong is None, wrong


def target(x: Tensor, copy: Copy, dtype: torch.dtype, *of: str) -> Target:
    """A target whose scales come `of` "scale", "amax", or the tile."""
    more = {name: triton_casts.per_block(x, copy.granularity) for name in of}
    return Target(copy, copy.empty(x, dtype), triton_casts.per_block(x, copy.granularity), **more)


def launches() -> dict[str, Launch]:
    """Every kind of launch that the recipes lead to."""
    x = torch.zeros(1024, 2048, dtype=BF16)
    ragged = torch.zeros(1001, 2047)

    def pair(
        x: Tensor, fmt: Format, kinds: tuple[Granularity, Granularity], rule: str, *of: str
    ) -> Launch:
        assert fmt.dtype is not None
        copies = [Copy(kinds[0]), Copy(kinds[1], transposed=True)]
        targets = [target(x, copy, fmt.dtype, *of) for copy in copies]
        return triton_casts.quantize_launch(x, fmt, targets, ScaleRule(rule))

    def amaxes(x: Tensor, *kinds: Granularity) -> Launch:
        found = [triton_casts.per_block(x, each) for each in kinds]
        return triton_casts.amax_launch(x, kinds, found)

    b1x128, b128x1, b128x128, b1x32, b32x1 = BLOCKS
    folded = [target(x, Copy(b1x32), BF16), target(x, Copy(b32x1), BF16)]
    return {
        "amax": amaxes(x, TENSOR),
        "amaxes": amaxes(ragged, ROW, COLUMN),
        "current": pair(x, E4M3, (TENSOR, TENSOR), "fp32", "amax"),
        "delayed": pair(x, E5M2, (TENSOR, TENSOR), "fp32", "scale"),
        "rowwise": pair(x, E4M3, (ROW, COLUMN), "power_of_two", "amax"),
        "block": pair(x, E4M3, (b1x128, b128x1), "fp32"),
        "block_ragged": pair(ragged, E5M2, (b1x128, b128x1), "power_of_two"),
        "weight": pair(x, E4M3, (b128x128, b128x128), "power_of_two"),
        "mx": pair(x, E5M2, (b1x32, b32x1), "e8m0"),
        "mx_folded": triton_casts.quantize_launch(x, E4M3, folded, ScaleRule("e8m0"), fold=True),
    }


class Pretended:
    """What Triton asks of a GPU before it compiles for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@pytest.fixture
def compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Launch, int], dict[str, str]]:
    """A launch's code for a compute capability, ×10, by Triton's own way up to the launch."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", None)

    def code(launch: Launch, capability: int) -> dict[str, str]:
        driver.set_active(Pretended(capability))
        made = launch.function().warmup(
            **launch.arguments, grid=launch.grid, num_warps=launch.warps
        )
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        tool = Path(sys.modules["triton"].__file__ or "").parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        )
        asm = {name: made.asm[name] for name in ("ttir", "ptx", "sass")}
        return {**asm, "usage": usage.stdout}

    return code


@needs_triton
@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", launches())
def test_code(
    compiled: Callable[[Launch, int], dict[str, str]], name: str, capability: int
) -> None:
    launch = launches()[name]
    code = compiled(launch, capability)
    ptx = code["ptx"]
    assert f".target sm_{capability}" in ptx
    assert not re.search(r"\.ftz|\bfma\.|div\.(full|approx)|\brcp\.|cvt\.\S*\bf16x2", ptx)
    if "ragged" not in name:  # no registers spilt; odd sizes cost an address an element
        assert re.search(r"STACK:0 .*LOCAL:0", code["usage"]), code["usage"]
    corners = re.findall(r"tt\.addptr .*: !tt\.ptr<\w+>, (i\d+)", code["ttir"])
    assert corners and set(corners) == {"i64"}  # matrices may be longer than 2^31
    divides = launch.arguments.get("KIND", "e8m0") != "e8m0" and launch.arguments["scale"] is None
    assert ("div.rn.f32" in ptx) == divides
    if not divides:  # a division is made of fused operations itself
        assert "FFMA" not in code["sass"]
    casts = {
        torch.float8_e4m3fn: r"cvt\.rn\.satfinite\.e4m3x2\.f32",
        torch.float8_e5m2: r"cvt\.rn\.satfinite\.e5m2x2\.f32",
        BF16: r"cvt\.rn\.bf16x2\.f32",
    }
    outs = [out for key in ("out", "out_2") if (out := launch.arguments.get(key)) is not None]
    copies = 1 if name == "weight" else len(outs)  # one cast serves both copies of a weight
    pairs = launch.arguments["TILE"] ** 2 // (launch.warps * 32) // 2  # of a thread's values
    found = {dtype: len(re.findall(cast, ptx)) for dtype, cast in casts.items()}
    assert found == {dtype: 0 for dtype in casts} | {out.dtype: pairs * copies for out in outs}
    if launch.kernel == "amax_tile":
        assert re.search(r"(atom|red)\.global\.gpu\.relaxed\.max\.s32", ptx)


def wire_launches() -> dict[str, Launch]:
    """Messages made and added, of even and of odd sizes."""
    found = {}
    for size in (2**20, 2**20 + 1):
        for fmt in (E5M2, E4M3):
            x, wire = torch.zeros(8, size), EightBit(fmt.name.lower(), fmt)
            sent = torch.zeros(8, wire.width(size), dtype=torch.uint8)
            about = f"{wire.name}_{size % 2}"
            found[f"encode_{about}"] = triton_wire.encode_launch(x, sent, fmt)
            found[f"add_{about}"] = triton_wire.add_launch(x[0], sent, fmt)
    return found


@needs_triton
@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", wire_launches())
def test_code_of_messages(
    compiled: Callable[[Launch, int], dict[str, str]], name: str, capability: int
) -> None:
    launch = wire_launches()[name]
    code = compiled(launch, capability)
    assert f".target sm_{capability}" in code["ptx"]
    assert not re.search(r"\.ftz|div\.(full|approx)|\brcp\.", code["ptx"])
    assert ("div.rn.f32" in code["ptx"]) == name.startswith("encode")
    assert re.search(r"STACK:0 .*LOCAL:0", code["usage"]), code["usage"]
    programs = -(-launch.arguments["size"] // 2048)
    assert launch.grid == (programs, 8 if name.startswith("encode") else 1)


@pytest.mark.parametrize(
    ("granularity", "block", "steps"),
    [
        (TENSOR, (64, 64), (0, 0)),
        (ROW, (1, 64), (1, 0)),
        (COLUMN, (64, 1), (0, 1)),
        (Granularity(1, 32), (1, 32), (7, 1)),
        (Granularity(32, 1), (32, 1), (200, 1)),
        (Granularity(1, 128), (1, 128), (2, 1)),
        (Granularity(128, 1), (128, 1), (200, 1)),
        (Granularity(128, 128), (128, 128), (2, 1)),
    ],
    ids=str,
)
def test_a_launch_covers_the_matrix(
    granularity: Granularity, block: tuple[int, int], steps: tuple[int, int]
) -> None:
    x = torch.zeros(300, 200, dtype=BF16)
    one = target(x, Copy(granularity), FP32)
    launch = triton_casts.quantize_launch(x, E4M3, [one], ScaleRule())
    got, tile = launch.arguments, 128 if 128 in block else 64
    assert (got["R"], got["C"]) == block
    assert (got["row_step"], got["column_step"]) == steps
    assert (got["rows"], got["columns"], got["TILE"]) == (300, 200, tile)
    assert launch.grid == ({64: 5 * 4, 128: 3 * 2}[tile],)
    assert launch.warps == {64: 4, 128: 8}[tile]
    assert got["out_2"] is None
    last = (-(-300 // block[0]) - 1) * steps[0] + (-(-200 // block[1]) - 1) * steps[1]
    assert last == one.scale_inv.numel() - 1


def test_a_pair_takes_the_larger_tile() -> None:
    x = torch.zeros(300, 200)
    pair = [target(x, Copy(ROW), FP32, "amax"), target(x, Copy(BLOCKS[0], True), FP32)]
    got = triton_casts.quantize_launch(x, E4M3, pair, ScaleRule()).arguments
    assert (got["R"], got["C"], got["R_2"], got["C_2"]) == (1, 128, 1, 128)
    assert (got["column_step"], got["column_step_2"], got["row_step_2"]) == (0, 1, 2)
    assert (got["TRANSPOSED"], got["TRANSPOSED_2"]) == (False, True)
    assert got["amax"].dtype == torch.int32 and got["amax_2"] is None


def test_a_transposed_copy_has_the_shape_of_x() -> None:
    x = torch.zeros(3, 5, dtype=BF16)
    made = Copy(COLUMN, transposed=True).empty(x, torch.float8_e4m3fn)
    assert made.shape == x.shape and made.dtype == torch.float8_e4m3fn
    assert made.t().is_contiguous()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("margin", [0, 3, -2])
def test_rule_numbers_are_those_of_scaling(fmt: Format, margin: int) -> None:
    number, inverse = triton_casts.rule_numbers(ScaleRule("e8m0", margin), fmt, 1.0)
    assert number == 2.0**margin
    assert torch.equal(torch.tensor(inverse), torch.tensor(1.0) / torch.tensor(fmt.max))
    largest, overflow = triton_casts.rule_numbers(ScaleRule("fp32", margin), fmt, BF16_MAX)
    assert (largest, overflow) == (fmt.max / 2.0**margin, BF16_MAX)


def test_what_the_kernels_take() -> None:
    assert not triton_casts.usable(torch.zeros(2, 2))  # it is on the CPU
    assert triton_casts.supports(E4M3, Granularity(1, 128), torch.float8_e4m3fn)
    assert triton_casts.supports(E2M1, Granularity(1, 16), BF16)
    assert not triton_casts.supports(E4M3, Granularity(1, 128), torch.float8_e5m2)
    assert not triton_casts.supports(E4M3, Granularity(1, 256), BF16)
    assert not triton_casts.supports(E4M3, Granularity(96, 96), BF16)
    assert not triton_casts.supports(E4M3FNUZ, TENSOR, BF16)  # it has no −0


@pytest.mark.skipif(triton_casts.available(), reason="here Triton is there to be used")
def test_the_host_side_needs_no_triton() -> None:
    lines = (
        "import sys, fp8train.precision.kernels.triton_casts\nassert 'triton' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", lines],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )


def run_checks() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        try:
            function()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run_checks()))
