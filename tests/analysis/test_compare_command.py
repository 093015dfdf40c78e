"""launch/compare.py and scripts/gap_table.py as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MakeRun = Callable[..., Path]


def call(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_two_folders_that_agree_exit_with_0(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("fp8", "fp8_current", gap=0.002)
    make_run("bf16")
    result = call("launch/compare.py", "fp8", "bf16", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "PASS" in result.stdout
    folder = tmp_path / "outputs" / "compare-fp8-bf16"
    assert sorted(path.name for path in folder.iterdir()) == [
        "comparison.json",
        "loss.png",
        "report.md",
    ]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["bf16", "fp8", "outputs"]  # Hydra left nothing


def test_a_gap_beyond_the_gate_exits_with_1(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("fp8", "fp8_current", gap=0.006)
    make_run("bf16")
    arguments = ("compare.max_gap=0.004", "fp8", "bf16", "compare.dir=here")
    result = call("launch/compare.py", *arguments, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "FAIL" in result.stdout
    assert json.loads((tmp_path / "here" / "comparison.json").read_text())["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "1 run folders given (one): give two"),
        (["a", "b", "precision=bf16"], "precision=bf16 has no effect on finished runs"),
        (["a", "b", "compare.max_gap=0"], "compare.max_gap=0.0: must be above 0"),
        (["+recipe=llama_fp8", "precision=bf16"], "is the candidate's precision too"),
        (["+recipe=llama_fp8", "baseline=bf61"], "baseline=bf61: choose one of bf16"),
    ],
)
def test_a_mistake_is_one_line_and_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = call("launch/compare.py", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_value_of_a_hydra_option_is_no_run_folder(tmp_path: Path) -> None:
    result = call("launch/compare.py", "+recipe=llama_fp8", "--cfg", "job", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "baseline: bf16" in result.stdout


def test_the_gap_table_refuses_a_mistake(tmp_path: Path) -> None:
    result = call("scripts/gap_table.py", "precision=fp8_block", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: precision=fp8_block has no effect")
    assert result.stderr.count("\n") == 1
