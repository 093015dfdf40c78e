"""The scripts that make the documentation's figures, on sizes that take no time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from scripts import bench_emulation, snr_table


def test_the_bench_measures_what_torchao_has() -> None:
    recipes = ["fp8_current", "fp8_rowwise_bf16_wgrad", "mxfp8", "nvfp4", "mxfp4"]
    rows = bench_emulation.measure_linear((32, 64, 96), recipes, pairs=1)
    assert [row["recipe"] for row in rows] == recipes
    assert {row["shape"] for row in rows} == {"32x64->96"}
    assert all(row["least"] <= row["ratio_to_bf16"] <= row["most"] for row in rows)
    beside_torchao = [row["recipe"] for row in rows if row["speedup_over_torchao"] is not None]
    assert beside_torchao == ["fp8_current", "fp8_rowwise_bf16_wgrad", "mxfp8"]
    assert [bench_emulation.text(row)[-1] == "—" for row in rows] == [False] * 3 + [True] * 2


def test_the_bench_runs_the_quickstarts_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_emulation, "TOKENS", (1, 8))
    (row,) = bench_emulation.measure_model(["fp8_current"], pairs=1)
    assert row["shape"] == "llama_tiny [1, 8]" and row["ratio_to_bf16"] > 0


def test_the_picture_of_the_snr_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(snr_table, "SHAPE", (42, 256))
    rows = snr_table.measure()
    assert len(rows) == 5 * len(snr_table.SCALINGS)
    assert len(snr_table.table(rows).splitlines()) == 2 + len(snr_table.SCALINGS)
    snr_table.plot(rows, tmp_path / "new" / "snr.png")
    assert Image.open(tmp_path / "new" / "snr.png").size == (1800, 1050)


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ("fp8_curent", "error: --recipes: fp8_curent: choose from fp8_delayed, "),
        ("mxfp8,mxfp8", "error: --recipes mxfp8,mxfp8: name each one once"),
    ],
)
def test_the_gap_table_refuses_recipes(recipes: str, message: str, repo: Path, tmp_path) -> None:
    command = [sys.executable, str(repo / "scripts" / "gap_table.py"), "--recipes", recipes]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_table_of_layouts(repo: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repo / "scripts" / "layout_table.py"), "--steps", "1"]
    command += ["--recipes", "fp32", "mxfp8", "--layouts", "TP2", "--json", "table.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    noise, row = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert noise["layout"] == "noise" and row["layout"] == "TP2"
    assert 0 < noise["differences"]["fp32"] < noise["differences"]["mxfp8"] < 0.1
    assert row["differences"].keys() == {"fp32", "mxfp8"}
