"""Quantized tensors: what they stand for, and files of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8train.config import ConfigError
from fp8train.precision.formats import BY_NAME, E2M1, E4M3, Format
from fp8train.precision.nvfp4 import quantize_nvfp4
from fp8train.precision.quantize import Payload, quantize
from fp8train.precision.scaling import ScaleRule
from fp8train.precision.tensor import COLUMN, ROW, TENSOR, Granularity, QuantizedTensor, spread

GRANULARITIES = [TENSOR, ROW, COLUMN, Granularity(1, 32), Granularity(128, 128)]
APART, FOLDED = Payload(torch.float32), Payload(torch.bfloat16, "always")


def test_granularity_by_name() -> None:
    assert [str(g) for g in GRANULARITIES] == ["tensor", "row", "column", "1x32", "128x128"]
    assert [g.grid(100, 70) for g in GRANULARITIES] == [(1, 1), (100, 1), (1, 70), (100, 3), (1, 1)]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_spread(granularity: Granularity) -> None:
    rows, columns = 130, 70
    grid = torch.rand(granularity.grid(rows, columns))
    r, c = granularity.block(rows, columns)
    full = spread(grid, granularity, rows, columns).expand(rows, columns)
    for i, j in ((0, 0), (129, 69), (127, 31), (128, 64)):
        assert full[i, j] == grid[i // r, j // c]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("kind", ["fp32", "power_of_two", "e8m0"])
def test_a_fold_stands_for_the_same(granularity: Granularity, kind: str) -> None:
    torch.manual_seed(0)
    x, rule = torch.randn(100, 70).bfloat16(), ScaleRule(kind)
    apart = quantize(x, E4M3, granularity, rule, APART)
    folded = quantize(x, E4M3, granularity, rule, FOLDED)
    assert folded.folded == (kind != "fp32" and granularity != TENSOR)
    assert torch.equal(apart.dequantize(), folded.dequantize())
    assert torch.equal(apart.grid_values(), folded.grid_values())
    assert apart.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("fmt", BY_NAME.values(), ids=lambda fmt: fmt.name)
def test_save_and_load(fmt: Format, granularity: Granularity, fold: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 45)
    payload = FOLDED if fold else APART
    saved = quantize(x, fmt, granularity, ScaleRule("power_of_two"), payload)
    saved.save(tmp_path / "w.safetensors")
    loaded = QuantizedTensor.load(tmp_path / "w.safetensors")
    assert torch.equal(loaded.payload, saved.grid_values())
    assert torch.equal(loaded.scale_inv, saved.scale_inv)
    assert (loaded.fmt, loaded.granularity) == (fmt, granularity)
    assert torch.equal(loaded.dequantize(), saved.dequantize())
    stored = load_file(tmp_path / "w.safetensors")["payload"]
    assert stored.element_size() * stored.numel() == 33 * (23 if fmt == E2M1 else 45)


def test_save_and_load_nvfp4(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 48)
    x[:16, :16] = 0
    for payload in (APART, FOLDED):
        saved = quantize_nvfp4(x, Granularity(16, 16), payload)
        saved.save(tmp_path / "w.safetensors")
        loaded = QuantizedTensor.load(tmp_path / "w.safetensors")
        assert loaded.tensor_scale_inv is not None
        assert torch.equal(loaded.dequantize(), saved.dequantize())


def test_another_file_is_refused(tmp_path: Path) -> None:
    save_file({"payload": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"other\.safetensors holds no quantized tensor"):
        QuantizedTensor.load(tmp_path / "other.safetensors")
