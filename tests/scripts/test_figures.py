"""The scripts that make the documentation's figures, on sizes that take no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from scripts import bench_emulation, bench_network, reduction_table, snr_table


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


# Relative errors in percent for N = 8, 32, 128, 1024, from another program: independent standard
# normals, power-of-two scales for blocks of 128.
KNOWN = {
    "ring, E5M2, scaled by 1/N": (12.9, 22.9, 43, 81),
    "ring, BF16": (0.40, 0.71, 1.4, 3.8),
    "all-to-all, E5M2": (5.3, 5.3, 5.3, 5.3),
    "all-to-all, E5M2, then all-gather": (7.4, 7.4, 7.5, 7.4),
    "all-to-all, E4M3": (2.6, 2.6, 2.6, 2.6),
}


def test_reductions_lose_what_is_known(tmp_path: Path) -> None:
    rows = reduction_table.by_ranks(4096)
    errors = {(row["method"], row["ranks"]): 100 * row["relative_error"] for row in rows}
    assert {method for method, _ in errors} == set(KNOWN)
    for method, figures in KNOWN.items():
        for ranks, figure in zip((8, 32, 128, 1024), figures, strict=True):
            assert errors[method, ranks] == pytest.approx(figure, rel=0.15), (method, ranks)
    # Two parts with the errors of one cast each make √2 of it over √2 of their sum.
    assert errors["all-to-all, E5M2", 2] == pytest.approx(5.3, rel=0.15)
    reduction_table.plot(rows, tmp_path / "errors.png")
    assert min(Image.open(tmp_path / "errors.png").size) > 400


def test_rounding_over_many_steps() -> None:
    errors = {row["rounding"]: row["relative_error"] for row in reduction_table.by_steps(4096)}
    steps = reduction_table.STEPS
    assert errors["nearest"] == pytest.approx(0.053, rel=0.15)  # one step's: it is always the same
    assert errors["stochastic"] == pytest.approx(0.0076, rel=0.15)
    assert errors["error feedback"] < 2 * errors["nearest"] / steps  # what one step lost, at most


@pytest.mark.slow
def test_bytes_on_real_sockets(repo: Path, tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    options = ("--nodes", "2", "--rates", "1gbit", "--steps", "1", "--json", str(file))
    command = [sys.executable, str(repo / "scripts" / "bench_network.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == bench_network.SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode in (0, 1), done.stderr  # 1: a matter of seconds, which are no test's
    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"]}
    expected = {  # a parameter and direction: gradients and weights
        "FSDP2": 2 + 1,  # gloo sends its reduce-scatter as an all-reduce
        "FP32": (4 + 2) / 2,
        "BF16": (2 + 2) / 2,
        "E5M2": (1 + 2) / 2,
        bench_network.OURS: (1 + 1) / 2,
    }
    for method, bytes_ in expected.items():
        assert rows[method]["bytes_per_linear_parameter"] == pytest.approx(bytes_, rel=0.05), method


def test_targets_that_are_missed_are_named() -> None:
    row = {
        "method": bench_network.OURS,
        "nodes": 2,
        "bandwidth": bench_network.SLOW,
        "bytes_per_linear_parameter": 1.04,
        "wire_ratio_to_bf16": 0.54,
        "total_ratio_to_bf16": 0.61,
    }
    assert bench_network.missed([row]) == [
        "2 nodes, 100mbit: total_ratio_to_bf16 0.610, at most 0.600"
    ]
    assert not bench_network.missed([row | {"bandwidth": "1gbit"}])


def test_without_namespaces_the_bench_is_skipped_by_name(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "ip").write_text("#!/bin/sh\necho 'mount: permission denied' >&2\nexit 1\n")
    (tmp_path / "ip").chmod(0o755)
    (tmp_path / "tc").symlink_to(tmp_path / "ip")
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = [sys.executable, str(repo / "scripts" / "bench_network.py"), "--nodes", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PATH": path}, check=False
    )
    assert done.returncode == bench_network.SKIPPED
    assert done.stdout.startswith("bench_network: skipped, it can't make network namespaces")
    assert "permission denied" in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gradients.reduce=bf16", "gradients.reduce=bf16 has no effect on this table"),
        ("trainer.seed=3", "trainer.seed=3 has no effect on this table"),
    ],
)
def test_the_table_of_reduction_gaps_refuses(given: str, message: str, repo: Path) -> None:
    command = [sys.executable, str(repo / "scripts" / "reduction_gap.py"), given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.slow
def test_the_table_of_reduction_gaps(repo: Path, tmp_path: Path) -> None:
    file = tmp_path / "gap.json"
    options = ("--seeds", "7", "--json", str(file), "trainer.steps=3", "compare.processes=2")
    sizes = ("trainer.validate_every=0", "trainer.sequence_length=32")
    command = [sys.executable, str(repo / "scripts" / "reduction_gap.py"), *options, *sizes]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    rows = {row["reduction"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["fp32"]["gap"] is None
    assert 0 < abs(rows["e5m2"]["gap"]) < abs(rows["ring-unscaled"]["gap"])
