"""Hopper's accumulator: sums worked out by hand, mmaemu's model of an H100, the two forms."""

from collections.abc import Iterator, Sequence
from unittest import mock

import mmaemu
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8train.precision.formats import E4M3, E5M2, Format, cast
from fp8train.precision.kernels import hopper

PAIRS = pytest.mark.parametrize(
    "formats",
    [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    ids=lambda pair: "x".join(fmt.name for fmt in pair),
)
PROMOTE = pytest.mark.parametrize("promote", [None, 128], ids=["fast", "split"])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small operations by the thousand, in the oracle and in the torch form, don't gain from
    threads, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bits(x: Tensor) -> Tensor:
    """Bit patterns, all NaNs alike; −0 and +0 differ."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def same(a: Tensor, b: Tensor) -> None:
    assert torch.equal(bits(a), bits(b))


def dot(
    a: Sequence[float],
    b: Sequence[float],
    formats: tuple[Format, Format] = (E4M3, E4M3),
    promote: int | None = None,
) -> float:
    """One element, after a check that the compiled and the torch form agree on it."""
    left, right = torch.tensor([a]), torch.tensor([b]).t()
    result = hopper.gemm(left, right, formats, promote=promote)
    same(result, plain(left, right, formats, promote))
    return result.item()


def plain(a: Tensor, b: Tensor, formats: tuple[Format, Format], promote: int | None) -> Tensor:
    """The torch form, as it runs without a compiler."""
    with mock.patch.object(hopper, "library", return_value=None):
        return hopper.gemm(a, b, formats, promote=promote)


def oracle(a: Tensor, b: Tensor, promote: int | None) -> Tensor:
    """mmaemu's FP32 result for FP8 a [M, K] and b [N, K] on an H100 that doesn't split K."""
    return mmaemu.accumulate(a, b, use_fast_accum=promote is None, profile="hopper", splitk=1)


def compare(a: Tensor, b: Tensor, formats: tuple[Format, Format], promote: int | None) -> None:
    """Both forms against the oracle; a [M, K] and b [N, K] in FP8."""
    expected = oracle(a, b, promote)
    same(hopper.gemm(a.float(), b.float().t(), formats, promote=promote), expected)
    same(plain(a.float(), b.float().t(), formats, promote), expected)


def test_kernel_is_built() -> None:
    assert hopper.library() is not None, "this machine has a compiler: the kernel must build"


def test_without_a_compiler_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert hopper.library.__wrapped__() is None


def test_terms_are_cut_thirteen_bits_below_the_largest() -> None:
    tiny = 2.0**-6
    assert dot([1, tiny], [1, 2.0**-7]) == 1 + 2.0**-13
    assert dot([1, tiny], [1, 2.0**-8]) == 1
    assert dot([1, *[tiny] * 31], [1, *[2.0**-8] * 31]) == 1  # each alone, not their sum


def test_cut_toward_zero() -> None:
    assert dot([1, 2.0**-6], [1, 1.75 * 2.0**-7]) == 1 + 2.0**-13
    assert dot([-1, 2.0**-6], [1, -1.75 * 2.0**-7]) == -1 - 2.0**-13


def test_sum_is_normalised_and_cut_again() -> None:
    # 2 + 2^-13 fits the grid of its terms, which begin at 1, but not fourteen bits.
    assert dot([1, 1, 2.0**-6], [1, 1, 2.0**-7]) == 2
    assert dot([1, 1, 2.0**-6, 2.0**-6], [1, 1, 2.0**-7, 2.0**-7]) == 2 + 2.0**-12


def test_products_are_not_normalised() -> None:
    # 1.5 · 1.5 = 2.25 counts as exponent 0: a term of 2^-13 beside it survives.
    assert dot([1.5, -1.5, 2.0**-6], [1.5, 1.5, 2.0**-7]) == 2.0**-13


def test_exponent_of_a_subnormal_is_its_format_s() -> None:
    a, b = [2.0**-9, 2.0**-9], [1, 2.0**-11]
    assert dot(a, b, (E4M3, E5M2)) == 2.0**-9
    assert dot(a, b, (E5M2, E5M2)) == 2.0**-9 + 2.0**-20


def test_accumulator_takes_part_in_the_alignment() -> None:
    a = [1, *[0] * 31, *[2.0**-6] * 32]
    b = [1, *[0] * 31, *[2.0**-8] * 32]
    assert dot(a, b) == 1
    assert dot(a[::-1], b[::-1]) == 1 + 32 * 2.0**-14  # the small ones first: one sum, then 1
    cut = dot([1, 2.0**-6, *[0] * 30, 256], [1, 2.0**-7, *[0] * 30, 1])
    assert cut == 257  # 1 + 2^-13, then cut at 2^-5


def test_promotion_saves_what_the_accumulator_would_cut() -> None:
    a = [1, *[0] * 127, *[2.0**-6] * 32]
    b = [1, *[0] * 127, *[2.0**-8] * 32]
    assert dot(a, b, promote=None) == 1
    assert dot(a, b, promote=128) == 1 + 32 * 2.0**-14


def test_a_sum_of_zero_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros() -> list[str]:
        pairs = (([-1.0, 1.0], [[1.0], [1.0]]), ([-1.0], [[0.0]]), ([-0.0] * 32, [[1.0]] * 32))
        sums = (hopper.partials(torch.tensor([a]), torch.tensor(b), (E4M3, E4M3)) for a, b in pairs)
        return [str(next(partial).item()) for partial in sums]

    assert zeros() == ["0.0"] * 3
    monkeypatch.setattr(hopper, "library", lambda: None)
    assert zeros() == ["0.0"] * 3


@PROMOTE
@PAIRS
@pytest.mark.parametrize("shape", [(48, 40, 1024), (33, 65, 100), (1, 1, 1), (66, 3, 4096)])
def test_random_matrices(
    formats: tuple[Format, Format], promote: int | None, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    torch.manual_seed(k)
    a, b = (cast(torch.randn(rows, k) * 20, fmt) for rows, fmt in zip((m, n), formats, strict=True))
    compare(a, b, formats, promote)


@PROMOTE
@PAIRS
def test_wide_exponents_and_cancellation(
    formats: tuple[Format, Format], promote: int | None
) -> None:
    torch.manual_seed(1)
    m, n, k = 40, 48, 500
    sides = []
    for rows, fmt in zip((m, n), formats, strict=True):
        low, high = fmt.min_exponent - fmt.mantissa_bits - 2, int(np.log2(fmt.max))
        x = torch.randn(rows, k) * 2.0 ** torch.randint(low, high, (rows, k))
        x[torch.rand(rows, k) < 0.2] = 0
        sides.append(cast(x, fmt))
    a, b = sides
    compare(a, b, formats, promote)
    # Every second pair of products cancels all but a remainder.
    a.view(torch.uint8)[:, 1::4] = a.view(torch.uint8)[:, ::4]
    b.view(torch.uint8)[:, 1::4] = b.view(torch.uint8)[:, ::4] ^ 0x80
    compare(a, b, formats, promote)


@PAIRS
@settings(deadline=None, max_examples=50)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 70), st.integers(1, 300)),
    seed=st.integers(0, 2**32 - 1),
    chance=st.sampled_from([0.0, 0.001, 1.0]),
    promote=st.sampled_from([None, 128]),
)
def test_any_bytes(
    formats: tuple[Format, Format],
    shape: tuple[int, int, int],
    seed: int,
    chance: float,
    promote: int | None,
) -> None:
    """All 256 codes, subnormal ones too; a code that is no number stays with the given chance."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(seed)
    sides = []
    for rows, fmt in zip((m, n), formats, strict=True):
        code = torch.randint(0, 256, (rows, k), dtype=torch.uint8, generator=generator)
        number = code.view(fmt.dtype).float().isfinite()
        keep = torch.rand(rows, k, generator=generator) < chance
        sides.append(torch.where(number | keep, code, 0).view(fmt.dtype))
    compare(*sides, formats, promote)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([torch.inf, 1], [2, 3], "inf"),
        ([torch.inf, 1], [-2, 3], "-inf"),
        ([torch.inf, 1], [0, 3], "nan"),
        ([torch.inf, torch.inf], [1, -1], "nan"),
        ([torch.nan, 1], [0, 3], "nan"),
    ],
)
def test_special_values(a: list[float], b: list[float], expected: str) -> None:
    assert str(dot(a, b, (E5M2, E4M3))) == expected


def test_special_values_stay_in_their_row_and_column() -> None:
    a, b = torch.ones(3, 200), torch.ones(200, 4)
    a[1, 5], b[150, 2] = torch.nan, torch.nan
    for promote in (None, 128):
        result = hopper.gemm(a, b, (E4M3, E4M3), promote=promote)
        expected = torch.full((3, 4), 200.0)
        expected[1], expected[:, 2] = torch.nan, torch.nan
        same(result, expected)


@PROMOTE
def test_strides_and_bf16(promote: int | None) -> None:
    torch.manual_seed(2)
    a, b = (cast(torch.randn(*shape) * 20, E4M3).float() for shape in ((50, 300), (300, 70)))
    expected = hopper.gemm(a, b, (E4M3, E4M3), promote=promote)
    for left in (a.bfloat16(), a.t().contiguous().t(), torch.stack((a, a), 2)[..., 0]):
        for right in (b.bfloat16(), b.t().contiguous().t()):
            same(hopper.gemm(left, right, (E4M3, E4M3), promote=promote), expected)


def test_partials_are_the_sums_of_their_slices() -> None:
    torch.manual_seed(3)
    a, b = (cast(torch.randn(*shape) * 20, E4M3).float() for shape in ((5, 300), (300, 7)))
    found = list(hopper.partials(a, b, (E4M3, E4M3)))
    for partial, k in zip(found, (0, 128, 256), strict=True):
        taken = slice(k, k + 128)
        same(partial, hopper.gemm(a[:, taken], b[taken], (E4M3, E4M3), promote=None))
    same(found[0] + found[1] + found[2], hopper.gemm(a, b, (E4M3, E4M3), promote=128))


def test_torch_form_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    a, b = (cast(torch.randn(*shape) * 20, E4M3).float() for shape in ((50, 96), (96, 30)))
    expected = hopper.gemm(a, b, (E4M3, E4M3), promote=None)
    monkeypatch.setattr(hopper, "CHUNK", 7 * 32 * 30)
    same(plain(a, b, (E4M3, E4M3), None), expected)


@PROMOTE
@pytest.mark.parametrize("shape", [(0, 3, 5), (3, 0, 5), (3, 5, 0)])
def test_empty(promote: int | None, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.ones(m, k), torch.ones(k, n)
    same(hopper.gemm(a, b, (E4M3, E4M3), promote=promote), torch.zeros(m, n))
    same(plain(a, b, (E4M3, E4M3), promote), torch.zeros(m, n))


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match=r"don't fit: \(2, 3\), \(4, 2\)"):
        hopper.gemm(torch.ones(2, 3), torch.ones(4, 2), (E4M3, E4M3), promote=None)
    with pytest.raises(ValueError, match="every 0 of K"):
        hopper.gemm(torch.ones(2, 3), torch.ones(3, 2), (E4M3, E4M3), promote=0)


def test_errors_at_k_4096() -> None:
    """About 1.3e-3 with fast accumulation, a tenth of it with split accumulation."""
    torch.manual_seed(0)
    sides = [torch.randn(64, 4096) for _ in range(2)]
    a, b = (cast(x * (448 / x.abs().max()), E4M3).float() for x in sides)
    exact = a.double() @ b.double().t()
    errors = [
        ((hopper.gemm(a, b.t(), (E4M3, E4M3), promote=promote) - exact).norm() / exact.norm())
        for promote in (None, 128)
    ]
    assert 1.1e-3 < errors[0] < 1.5e-3
    assert 1.1e-4 < errors[1] < 1.5e-4
